"""Generates the stubs of our protos and of others'; `--check` only says whether the checked-in stubs are current."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OURS = sorted((ROOT / "protos" / "pagewire" / "v1").glob("*.proto"))
# Folder of protos that belong to others -> the package that their stubs become.
FOREIGN = {
    ROOT / "third_party" / "smg": "pagewire/foreign/smg",
    ROOT / "third_party" / "triton": "pagewire/foreign/triton",
}
# Their files import each other by bare names, so that their stubs would have to lie at the top of sys.path.
_BARE_IMPORT = re.compile(r"^import (\w+_pb2)\b", re.MULTILINE)


def generate(out: Path) -> None:
    """Writes stubs and type stubs for all protos below `out`."""
    _protoc(ROOT / "protos", OURS, out)
    for folder, package in FOREIGN.items():
        target = out / package
        target.mkdir(parents=True, exist_ok=True)
        _protoc(folder, sorted(folder.glob("*.proto")), target)
        for path in target.glob("*_pb2*"):
            text = path.read_text(encoding="utf-8")
            path.write_text(_BARE_IMPORT.sub(rf"from {package.replace('/', '.')} import \1", text), encoding="utf-8")


def _protoc(include: Path, protos: list[Path], out: Path) -> None:
    args = [
        "protoc",
        f"-I{include}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *map(str, protos),
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = {p.relative_to(tmp): p.read_bytes() for p in Path(tmp).rglob("*_pb2*")}
    folders = {ROOT / "pagewire" / "v1", *(ROOT / package for package in FOREIGN.values())}
    checked_in = {p.relative_to(ROOT): p.read_bytes() for folder in folders for p in folder.glob("*_pb2*")}
    stale = sorted(str(n) for n in fresh.keys() | checked_in.keys() if fresh.get(n) != checked_in.get(n))
    if stale:
        print("stubs differ from protos (run `make stubs`):", *stale, sep="\n  ")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())

"""Builds the stubs as packages of their own: a wheel `pagewire-proto`, and with --node a tarball for npm.

Usage: build_proto_packages.py OUT [--node]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos/pagewire/v1"


def version() -> str:
    """Protos and stubs are released with pagewire."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def build_python(out: Path) -> None:
    """A wheel of pagewire/v1, protos included, without the rest of pagewire."""
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory) / "stage"
        shutil.copytree(ROOT / "packaging/proto-python", stage)
        (stage / "VERSION").write_text(version())
        target = stage / "pagewire/v1"
        shutil.copytree(ROOT / "pagewire/v1", target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "py.typed").touch()
        for proto in PROTOS.glob("*.proto"):
            shutil.copy(proto, target)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
        subprocess.run([*pip, "--wheel-dir", str(out), str(stage)], check=True)


def build_node(out: Path) -> None:
    """What `npm publish` takes."""
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory) / "stage"
        shutil.copytree(ROOT / "packaging/proto-node", stage)
        target = stage / "protos/pagewire/v1"
        target.mkdir(parents=True)
        for proto in PROTOS.glob("*.proto"):
            shutil.copy(proto, target)
        package = json.loads((stage / "package.json").read_text()) | {"version": version()}
        (stage / "package.json").write_text(json.dumps(package, indent=2) + "\n")
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(out)], cwd=stage, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--node", action="store_true", help="also the npm package (needs npm)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    build_python(out)
    if arguments.node:
        build_node(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

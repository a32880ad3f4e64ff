"""What `pagewire up` costs until it is ready and what it keeps in memory: `python -m bench.startup [--csv FILE]`.

Seconds until the ready line comes (of `all`), and CPU seconds (user + system) of each process by then: a busy machine
changes them less. Memory is PSS after a few prompts, as if nothing else ran here: a page that several of its processes
map counts once, in parts. Mapped weights are shown apart from what a process has of its own. The goal (MB = 10^6 bytes)
is

    1.15 x the weights' bytes + 350 MB for each worker + 150 MB for the router        (KV pools not allowed for)
"""

import argparse
import csv
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.machine import describe
from bench.peers.model import make_qwen2_shape
from engine.cache_dir import default_cache_dir
from pagewire import Client
from pagewire.cli.model import resolve_model

MB = 1e6
OWN_GOALS_MB = {"prefill": 350.0, "decode": 350.0, "router": 150.0}
WEIGHTS_FACTOR = 1.15
PROMPTS = ("Hello", "The capital of France is", "Once upon a time there was a " * 40, "1, 2, 3, 4, " * 100)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the system; bytes."""

    role: str
    cpu_seconds: float
    weights_pss: int
    own_pss: int


def roles(parent: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of one `up` with a worker of each kind."""
    found = {"up": parent}
    for child in parent.children():
        command = child.cmdline()
        found["valkey" if "valkey" in command[0] else command[3]] = child
    return found


def resident(pid: int) -> tuple[int, dict[str, int]]:
    """(the process's private bytes, bytes by mapped file) that are in memory, from /proc/PID/smaps."""
    private, path = 0, ""
    by_file: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            path = fields[5] if len(fields) == 6 else ""
        elif fields[0] == "Rss:":
            by_file[path] = by_file.get(path, 0) + int(fields[1]) * 1024
        elif fields[0] == "Anonymous:":  # of a file: pages that were written to
            private += int(fields[1]) * 1024
            by_file[path] -= int(fields[1]) * 1024
    return private, {path: held for path, held in by_file.items() if path and held}


def shares(held: Mapping[str, tuple[int, Mapping[str, int]]], weights: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """(of files below the directories `weights`, of everything else) in bytes, by role.

    A file's pages are shared out among the system's own processes that map it. The kernel's PSS would share them with
    whoever else runs here, too.
    """
    num_users = Counter(path for _, by_file in held.values() for path in by_file)
    found = {}
    for role, (private, by_file) in held.items():
        split = {path: size // num_users[path] for path, size in by_file.items()}
        mapped = sum(size for path, size in split.items() if any(Path(path).is_relative_to(each) for each in weights))
        found[role] = (mapped, private + sum(split.values()) - mapped)
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One start: the seconds on the wall until the ready line, and the processes."""

    seconds: float
    processes: list[Process]

    @property
    def cpu_seconds(self) -> float:
        return sum(each.cpu_seconds for each in self.processes)


def measure(model: Path, flags: Sequence[str]) -> Run:
    """Starts the system, asks it something, and stops it."""
    command = [sys.executable, "-m", "pagewire", "up", "--model", str(model), "--port", "0", *flags]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().strip()
            seconds = time.perf_counter() - started
            if not ready:
                raise SystemExit("pagewire up did not get ready")
            found = roles(psutil.Process(process.pid))
            times = {role: each.cpu_times() for role, each in found.items()}
            with Client(ready.split()[1]) as client:
                for prompt in PROMPTS:
                    client.complete(prompt, max_tokens=32, temperature=0)
            directories = (model.resolve(), default_cache_dir().resolve())
            memory = shares({role: resident(each.pid) for role, each in found.items()}, directories)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return Run(seconds, [Process(role, times[role].user + times[role].system, *memory[role]) for role in found])


def rows(model: Path, run: Run) -> list[dict[str, str]]:
    """A row for each process, for the mapped weights and for all together; goals where there are any."""
    processes = run.processes
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    weights_goal = WEIGHTS_FACTOR * stored / MB
    weights, own = sum(each.weights_pss for each in processes), sum(each.own_pss for each in processes)
    table = [
        (each.role, f"{each.cpu_seconds:.2f}", each.own_pss / MB, OWN_GOALS_MB.get(each.role)) for each in processes
    ]
    table.append(("mapped weights", "", weights / MB, weights_goal))
    table.append(("all", f"{run.cpu_seconds:.2f}", (weights + own) / MB, weights_goal + sum(OWN_GOALS_MB.values())))
    numbers = [
        {"what": what, "cpu_s": cpu, "pss_mb": f"{held:.0f}", "goal_mb": "" if goal is None else f"{goal:.0f}"}
        for what, cpu, held, goal in table
    ]
    return [{**row, "ready_s": f"{run.seconds:.2f}" if row["what"] == "all" else ""} for row in numbers]


def best_run(model: Path, rounds: int, flags: Sequence[str]) -> Run:
    """The first run, which may pack weights, doesn't count."""
    runs = []
    for number in range(rounds + 1):
        runs.append(run := measure(model, flags))
        note = "" if number else " (not counted)"
        print(f"{model.name}: ready after {run.seconds:.2f} s, {run.cpu_seconds:.2f} s of CPU{note}", flush=True)
    return min(runs[1:], key=lambda run: run.cpu_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["demo", "qwen"], help="qwen: Qwen2-0.5B's shape, made in --work"
    )
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the model")
    parser.add_argument("--rounds", type=int, default=3, help="the one with the fewest CPU seconds counts")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of `pagewire up`, after --")
    arguments = parser.parse_args()
    machine = describe()
    table = []
    for name in arguments.models:
        model = make_qwen2_shape(arguments.work / "qwen2-0.5b-shape") if name == "qwen" else resolve_model(name)
        run = best_run(model, arguments.rounds, arguments.flags)
        table += [{**machine, "model": model.name, **row} for row in rows(model, run)]
    print(f"{'':18}{'':16}{'CPU s':>8}{'PSS MB':>8}{'goal':>8}{'ready s':>8}")
    for row in table:
        numbers = (row[name] for name in ("cpu_s", "pss_mb", "goal_mb", "ready_s"))
        print(f"{row['model']:18}{row['what']:16}" + "".join(f"{number:>8}" for number in numbers))
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()

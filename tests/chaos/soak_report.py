"""What happened in a soak: counts, the memory of processes that lived, and the verdict."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tests.chaos.system import Service, System

# A process that was spared in the second half may grow by this much there: pools and caches are full by then, so only
# a leak grows for ever. One that started just before grows by 20 MiB while it warms up.
MAX_GROWTH_MIB = 40
MAX_MORE_FDS = 40
_COUNTERS = {
    "router": {"migrations": "pagewire:migrations_total", "prefill retries": "pagewire:prefill_retries_total"},
    "prefill": {"leases expired": "pagewire:leases_expired_total", "leases revoked": "pagewire:leases_revoked_total"},
    "decode": {
        "failed pulls": "pagewire:transfer_failures_total",
        "preemptions": "vllm:num_preemptions_total",
        "blocks pulled": "pagewire:transfer_blocks_total",
    },
}


@dataclass
class Tally:
    """Ends of requests, harm done, counters of all processes that ever lived; `faults` must stay empty."""

    ends: Counter[str] = field(default_factory=Counter)
    hurts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    _counters: dict[tuple[str, int], float] = field(default_factory=dict)

    def read_counters(self, service: Service) -> None:
        """To be called now and then, and before a process dies: its counters die with it."""
        for label, name in _COUNTERS[service.role].items():
            with suppress(OSError):  # it does not answer just now
                self._counters[label, service.pid] = service.metric(name, timeout=1.0)

    def total(self, label: str) -> int:
        return round(sum(value for (name, _), value in self._counters.items() if name == label))

    def lines(self) -> list[str]:
        """The report, without the verdict."""
        labels = [label for counters in _COUNTERS.values() for label in counters]
        return [
            f"requests: {dict(sorted(self.ends.items()))}",
            f"hurts: {dict(sorted(self.hurts.items()))}",
            f"counters: { ({label: self.total(label) for label in labels}) }",
            *self.memory,
            *(f"fault: {fault}" for fault in self.faults),
        ]


@dataclass(frozen=True, slots=True)
class Use:
    """What a process used at a moment, seconds."""

    at: float
    rss_mib: float
    num_fds: int


class MemoryWatch:
    """Samples the processes that are spared; `check` compares their end with their state after a warm-up."""

    def __init__(self, system: System, names: tuple[str, ...]) -> None:
        self._system = system
        self._pids = {name: system[name].pid for name in names}
        self._samples: dict[str, list[Use]] = defaultdict(list)

    def sample(self) -> None:
        for name, pid in self._pids.items():
            process = psutil.Process(pid)
            self._samples[name].append(Use(time.monotonic(), process.memory_info().rss / (1 << 20), process.num_fds()))

    def check(self, tally: Tally) -> None:
        """Adds a line for each process, and a fault for each that grew."""
        for name, samples in self._samples.items():
            if self._system[name].pid != self._pids[name]:
                tally.faults.append(f"{name} was to be spared and is another process now")
                continue
            self.compare(name, samples, tally)

    @staticmethod
    def compare(name: str, samples: Sequence[Use], tally: Tally) -> None:
        """The last sample with the first third."""
        warm_until = samples[0].at + (samples[-1].at - samples[0].at) / 3
        warm = [sample for sample in samples if sample.at <= warm_until]
        before, num_fds = max(sample.rss_mib for sample in warm), max(sample.num_fds for sample in warm)
        after, seconds = samples[-1], samples[-1].at - warm_until
        tally.memory.append(
            f"{name}: {before:.0f} MiB when warm, {after.rss_mib:.0f} MiB {seconds:.0f} s later; "
            f"{num_fds} and {after.num_fds} fds"
        )
        if after.rss_mib > before + MAX_GROWTH_MIB:
            tally.faults.append(f"{name} grew by {after.rss_mib - before:.0f} MiB, at most {MAX_GROWTH_MIB} are fine")
        if after.num_fds > num_fds + MAX_MORE_FDS:
            tally.faults.append(f"{name} has {after.num_fds} fds, {num_fds} when warm")

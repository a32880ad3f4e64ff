"""What came out of a run: a row of a table, of a CSV, a part of a plot."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Sample:
    """A request: seconds to its first token (so far, if there is none), tokens of its prompt and those that were hits.

    Without a first token nobody has looked at its prompt: `num_prompt_tokens` is 0.
    """

    ttft: float
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived in the measured time. Those without a first token yet count with their wait."""

    how: str  # "simulated", or "real"
    policy: str
    working_set: float
    rate: float
    num_requests: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    output_tokens_per_second: float
    hit_rate: float

    @classmethod
    def of(
        cls,
        how: str,
        policy: str,
        working_set: float,
        rate: float,
        samples: Sequence[Sample],
        output_tokens_per_second: float,
    ) -> "Outcome":
        waits = sorted(each.ttft for each in samples)
        p50, p90, p99 = (waits[min(int(share * len(waits)), len(waits) - 1)] for share in (0.5, 0.9, 0.99))
        hit_rate = sum(each.num_hit_tokens for each in samples) / max(
            1, sum(each.num_prompt_tokens for each in samples)
        )
        return cls(how, policy, working_set, rate, len(waits), p50, p90, p99, output_tokens_per_second, hit_rate)

    @classmethod
    def median_of(cls, outcomes: Sequence["Outcome"]) -> "Outcome":
        """Of runs that differ by chance alone: the median of each number."""
        names = [each.name for each in fields(cls)]
        columns = ([getattr(each, name) for each in outcomes] for name in names)
        return cls(*(column[0] if isinstance(column[0], str) else median(column) for column in columns))

    def __str__(self) -> str:
        return (
            f"{self.how:<10}{self.policy:<8}{self.working_set:>5.0%}{self.rate:>8.1f}{self.num_requests:>7.0f}"
            f"{self.ttft_p50:>9.3f}{self.ttft_p90:>9.3f}{self.ttft_p99:>9.3f}"
            f"{self.output_tokens_per_second:>10.0f}{self.hit_rate:>7.1%}"
        )


HEAD = "how       policy    set   req/s      n    p50 s    p90 s    p99 s  tokens/s   hits"


def write(outcomes: Sequence[Outcome], about: Mapping[str, object], path: Path) -> None:
    """A CSV; `about` is the same in all rows."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(each.name for each in fields(Outcome)), *about])
        for outcome in outcomes:
            row = [f"{value:.4g}" if isinstance(value, float) else value for value in astuple(outcome)]
            writer.writerow([*row, *about.values()])


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """TTFT by policy (needs matplotlib: the extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sets = sorted({each.working_set for each in outcomes})
    figure, panels = plt.subplots(1, len(sets), figsize=(5 * len(sets), 4), sharey=True, squeeze=False)
    for panel, working_set in zip(panels[0], sets, strict=True):
        rows = [each for each in outcomes if each.working_set == working_set]
        for offset, name in enumerate(("ttft_p50", "ttft_p90", "ttft_p99")):
            positions = [number + 0.27 * (offset - 1) for number in range(len(rows))]
            panel.bar(positions, [getattr(each, name) for each in rows], 0.27, label=name.replace("_", " "))
        panel.set_xticks(range(len(rows)), [f"{each.policy}\nhit {each.hit_rate:.0%}" for each in rows])
        panel.set_yscale("log")
        panel.set_title(f"working set {working_set:.0%} of the KV, {rows[0].rate:.1f} requests/s")
    panels[0][0].set_ylabel("seconds")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)

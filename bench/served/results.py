"""What was measured, as a CSV that grows point by point, a table and a plot."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.served.loads import Numbers
from bench.served.points import Point

OURS = "pagewire"


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of our system, and of another one beside it: medians of the rounds and of their ratios.

    Numbers are text as they stand in the file; `ratio` above 1: ours is better. Without a goal `goal` is empty.
    """

    point: str
    metric: str
    system: str
    ours: str
    theirs: str
    ratio: str
    lowest: str
    highest: str
    goal: str
    met: str


def rows(name: str, point: Point, rounds: Sequence[Mapping[str, Numbers]]) -> list[Row]:
    """A row for each metric and other system, and for each limit of ours. `rounds`: by system, then by metric."""
    ours, *others = point.systems
    goals = {(goal.metric, goal.system): goal for goal in point.goals}
    found = []
    for other in others:
        for metric in rounds[0][ours]:
            pairs = [(each[ours][metric], each[other][metric]) for each in rounds]
            ratios = [b / a if metric.endswith("ms") else a / b for a, b in pairs]
            a, b = (statistics.median(values) for values in zip(*pairs, strict=True))
            goal = goals.get((metric, other))
            numbers = [f"{value:.4g}" for value in (a, b, statistics.median(ratios), min(ratios), max(ratios))]
            verdict = ("", "") if goal is None else (goal.text, "yes" if goal.is_met(pairs) else "no")
            found.append(Row(name, metric, other, *numbers, *verdict))
    for metric, limit in point.limits:
        value = statistics.median(each[ours][metric] for each in rounds)
        met = "yes" if value <= limit else "no"
        found.append(Row(name, metric, "", f"{value:.4g}", "", "", "", "", f"at most {limit:g}", met))
    return found


_NAMES = [each.name for each in fields(Row)]


def _lines(path: Path, hardware: str) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [line for line in csv.DictReader(file) if line["hardware"] == hardware]


def read(path: Path, hardware: str) -> list[Row]:
    """What the file has of this hardware."""
    return [Row(**{name: line[name] for name in _NAMES}) for line in _lines(path, hardware)]


def write(path: Path, point: str, found: Sequence[Row], machine: Mapping[str, str]) -> None:
    """Takes the place of what the file had of this point; what is of other hardware goes."""
    kept = [line for line in _lines(path, machine["hardware"]) if line["point"] != point]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*_NAMES, *machine], lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *({**asdict(row), **machine} for row in found)])


def show(found: Sequence[Row]) -> None:
    """Above 1 is better for pagewire."""
    table = Table("point", "metric", "against", OURS, "other", "ratio", "of rounds", "goal")
    for row in found:
        colour = {"yes": "[green]", "no": "[red]"}.get(row.met, "")
        between = f"{row.lowest} … {row.highest}" if row.ratio else ""
        table.add_row(
            row.point, row.metric, row.system, row.ours, row.theirs, f"{colour}{row.ratio}", between, colour + row.goal
        )
    Console(width=160).print(table)


def plot(path: Path, found: Sequence[Row], title: str) -> None:
    """Ratios of what has a goal, as bars from the lowest to the highest round, goals as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in found if row.goal and row.ratio]
    ratios = [float(row.ratio) for row in shown]
    spread = [
        [ratio - float(row.lowest) for ratio, row in zip(ratios, shown, strict=True)],
        [float(row.highest) - ratio for ratio, row in zip(ratios, shown, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(shown) + 1.5))
    places = range(len(shown))
    axes.barh(places, ratios, xerr=spread, color="tab:blue", alpha=0.7, label="median of rounds")
    axes.plot([float(row.goal.split("x")[0]) for row in shown], places, "k|", markersize=18, label="goal")
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(places, [f"{row.point}: {row.metric} against {row.system}" for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times better")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)

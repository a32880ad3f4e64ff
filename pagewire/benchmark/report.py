"""The report of a run: one figure (distributions, timeline, throughput) as PNG, and a page that needs nothing else.

matplotlib is an extra, `pagewire[bench]`. Only its Figure is used: no window, no global state.
"""

import base64
import html
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagewire.benchmark.options import MetricName
from pagewire.benchmark.outcome import Outcome, Run
from pagewire.benchmark.statistics import Summary, running_over_time, seconds_of, tokens_over_time
from pagewire.benchmark.table import TITLES, totals

_DISTRIBUTIONS: tuple[MetricName, ...] = ("ttft", "tpot", "itl", "e2el")
_WAITING, _DECODING, _FAILED, _QUEUED = "#e69f00", "#0072b2", "#d55e00", "#cccccc"
_NUM_BUCKETS = 120
_DOTS_PER_INCH = 110

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 2em 1em 0; display: inline-table; vertical-align: top }}
th, td {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
caption {{ text-align: left; font-weight: 600; padding: .3em 0 }}
img {{ width: 100%; height: auto }}
.bad {{ color: {failed} }}
</style></head><body>
<h1>{title}</h1>
<p>{subtitle}</p>
{tables}
<img alt="Latency distributions, timeline of requests, throughput over time" src="data:image/png;base64,{image}">
</body></html>
"""


class ReportError(Exception):
    """matplotlib is not there."""


def require_matplotlib() -> None:
    """Raises ReportError, so that a run needn't end before one knows."""
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ReportError(f"--report needs matplotlib ({error}): install 'pagewire[bench]'") from None


def write_report(
    stem: Path, run: Run, result: Mapping[str, Any], found: Mapping[MetricName, Summary], setup: Mapping[str, str]
) -> tuple[Path, Path]:
    """Writes stem.png and stem.html and returns both. Raises ReportError, OSError."""
    require_matplotlib()
    image = _png(run)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".html")
    paths[0].write_bytes(image)
    paths[1].write_text(page(result, found, setup, image), encoding="utf-8")
    return paths


def page(result: Mapping[str, Any], found: Mapping[MetricName, Summary], setup: Mapping[str, str], image: bytes) -> str:
    """The HTML page; everything that came from outside is escaped."""
    percentiles = [which for which, _ in next(iter(found.values())).percentiles] if found else []
    latencies = [
        [TITLES[metric][0], *(f"{value:.2f}" for value in (summary.mean, summary.median, summary.std)),
         *(f"{value:.2f}" for _, value in summary.percentiles)]
        for metric, summary in found.items()
    ]  # fmt: skip
    errors = [[code, str(count)] for code, count in result["errors_by_code"].items()]
    tables = [
        _table("Latency, ms", ["", "mean", "median", "std", *(f"p{which:g}" for which in percentiles)], latencies),
        _table("Totals", None, [[name.strip().rstrip(":"), value] for name, value in totals(result)]),
        _table("Setup", None, [[name, value] for name, value in setup.items()]),
    ]
    if errors:
        tables.append(_table("Errors by code", None, errors, kind="bad"))
    state = "interrupted; what was measured" if result["interrupted"] else "complete"
    return _PAGE.format(
        title=html.escape(f"pagewire bench serve: {result['model_id']}"),
        subtitle=html.escape(f"{result['date']}, {state}"),
        tables="\n".join(tables),
        image=base64.b64encode(image).decode(),
        failed=_FAILED,
    )


def _table(caption: str, head: Sequence[str] | None, rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<table class="{kind}"><caption>{caption}</caption>{row(head, "th") if head else ""}{body}</table>'


def _png(run: Run) -> bytes:
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(13, 11), layout="constrained")
    grid = figure.add_gridspec(4, 4, height_ratios=(1, 1.7, 0.8, 0.8))
    for column, metric in enumerate(_DISTRIBUTIONS):
        _draw_distribution(figure.add_subplot(grid[0, column]), metric, run.outcomes)
    end = max([run.duration, *(outcome.ended_at for outcome in run.outcomes)])
    timeline = figure.add_subplot(grid[1, :])
    _draw_timeline(timeline, run.outcomes)
    _draw_throughput(figure.add_subplot(grid[2, :], sharex=timeline), run.outcomes, end)
    _draw_running(figure.add_subplot(grid[3, :], sharex=timeline), run.outcomes, end)
    timeline.set_xlim(0, end or 1)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def _draw_distribution(axes: Any, metric: MetricName, outcomes: Sequence[Outcome]) -> None:
    """A histogram, and how many stay below (right axis)."""
    values = 1e3 * np.sort(seconds_of(metric, outcomes))
    axes.set_title(TITLES[metric][0])
    axes.set_xlabel("ms")
    if not len(values):
        axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=axes.transAxes)
        return
    # The slowest hundredth would squeeze all others into one bar; the curve's end still says that it is there.
    limit = float(np.percentile(values, 99)) * 1.15 or 1.0
    axes.hist(values, bins=min(40, max(5, int(math.sqrt(len(values))))), range=(0, limit), color=_DECODING, alpha=0.55)
    axes.set_xlim(0, limit)
    axes.axvline(float(np.median(values)), color=_FAILED, linewidth=1, label=f"median {np.median(values):.1f}")
    axes.legend(loc="lower right", fontsize="small")
    below = axes.twinx()
    below.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color="black", linewidth=1)
    below.set_ylim(0, 1.03)


def _draw_timeline(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """One line a request, in the order of arrival."""
    spans: tuple[tuple[str, str, list[tuple[int, float, float]]], ...] = (
        ("waiting for its turn", _QUEUED, [(at, o.arrived_at, o.sent_at) for at, o in enumerate(outcomes)]),
        ("until the first token", _WAITING,
         [(at, o.sent_at, o.token_times[0] if o.token_times else o.ended_at)
          for at, o in enumerate(outcomes) if o.is_good]),
        ("until the last", _DECODING,
         [(at, o.token_times[0], o.token_times[-1])
          for at, o in enumerate(outcomes) if o.is_good and o.token_times]),
        ("failed", _FAILED, [(at, o.sent_at, o.ended_at) for at, o in enumerate(outcomes) if not o.is_good]),
    )  # fmt: skip
    # About the height that a request has, in points.
    width = min(8.0, max(0.4, 220 / max(1, len(outcomes))))
    for label, color, lines in spans:
        if lines:
            rows, begins, ends = zip(*lines, strict=True)
            axes.hlines(rows, begins, ends, colors=color, linewidth=width, label=label)
    axes.set_title("Requests, in the order of arrival")
    axes.set_ylim(len(outcomes) or 1, -1)
    if outcomes:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _draw_throughput(axes: Any, outcomes: Sequence[Outcome], end: float) -> None:
    width = (end or 1) / _NUM_BUCKETS
    moments = (np.arange(_NUM_BUCKETS) + 0.5) * width
    axes.fill_between(moments, tokens_over_time(outcomes, width, _NUM_BUCKETS), step="mid", color=_DECODING, alpha=0.6)
    axes.set_title(f"Output tokens/s, over {width:.2g} s")
    axes.set_ylim(bottom=0)


def _draw_running(axes: Any, outcomes: Sequence[Outcome], end: float) -> None:
    moments = np.linspace(0, end or 1, 4 * _NUM_BUCKETS)
    axes.fill_between(moments, running_over_time(outcomes, list(moments)), step="mid", color=_WAITING, alpha=0.6)
    axes.set_title("Requests in flight")
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)

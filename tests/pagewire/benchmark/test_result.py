"""The result's names and files, the table, the report."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pagewire.benchmark.options import ServeBenchOptions
from pagewire.benchmark.outcome import Run
from pagewire.benchmark.report import ReportError, page, require_matplotlib, write_report
from pagewire.benchmark.result import DETAILS, result_json, result_path, summaries, write_result
from pagewire.benchmark.table import render
from pagewire.config import options_from_flags
from tests.pagewire.benchmark.runs import outcome, run

DATE = datetime(2026, 11, 30, 12, 5, 6)
# As in a file that vLLM's `bench serve --save-result --save-detailed` wrote, what is only of speech aside.
VLLM_NAMES = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens",
    "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
    "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms",
}  # fmt: skip


def options(**flags: object) -> ServeBenchOptions:
    return options_from_flags(ServeBenchOptions, flags)


def result(of: Run, goodput: dict[str, float] | None = None, **flags: object) -> dict[str, Any]:
    return result_json(options(**flags), of, model="org/m", date=DATE, goodput=goodput or {}, metadata={"tp": "2"})


def test_names_are_vllms() -> None:
    found = result(run())
    own = {"errors_by_code", "interrupted", "total_cached_tokens", "dataset_name", "seed", "latencies", "queue_times"}
    assert set(found) == VLLM_NAMES | own | {"tp"}


def test_counts_rates_and_goodput_of_a_run() -> None:
    found = result(run(), {"ttft": 200.0}, request_rate="5")
    assert (found["completed"], found["failed"], found["date"]) == (3, 2, "20261130-120506")
    assert found["errors_by_code"] == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (21, 9, 12)
    assert found["request_throughput"] == 3 / 4
    assert found["request_goodput"] == 2 / 4
    assert found["output_throughput"] == 9 / 4
    assert found["total_token_throughput"] == 30 / 4
    assert found["max_output_tokens_per_s"] == 4.0  # in the first second
    assert found["max_concurrent_requests"] == 2
    assert found["output_lens"] == [3, 1, 0, 5, 0]
    assert found["errors"] == ["", "", "RESOURCE_EXHAUSTED: no room", "", "UNAVAILABLE: no room"]
    assert found["request_rate"] == 5.0
    assert result(run())["request_goodput"] is None
    assert result(run())["request_rate"] == "inf"
    assert found["mean_ttft_ms"] == pytest.approx(200.0)


def test_only_what_was_asked_for() -> None:
    found = result(run(), percentile_metrics="itl", metric_percentiles="50,99.9")
    assert {name for name in found if name.endswith("_ms")} == {
        "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p50_itl_ms", "p99.9_itl_ms",
    }  # fmt: skip


def test_file_names() -> None:
    assert result_path(options(), "org/m", DATE) == Path("pagewire-infqps-m-20261130-120506.json")
    named = options(request_rate="2.5", max_concurrency="4", label="run", result_dir="d")
    assert result_path(named, "m", DATE) == Path("d/run-2.5qps-concurrency4-m-20261130-120506.json")
    assert result_path(options(result_dir="d", result_filename="x.json"), "m", DATE) == Path("d/x.json")


def test_files(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "a.json", result(run())
    write_result(path, found, detailed=True, append=False)
    assert json.loads(path.read_text()) == found
    write_result(path, found, detailed=False, append=False)
    write_result(path, found, detailed=False, append=True)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == second == {name: value for name, value in found.items() if name not in DETAILS}


def test_table_counts_errors_by_code() -> None:
    text = render(result(run(), {"ttft": 200.0}), summaries(options(), run()))
    lines = {name.strip(): value for name, _, value in (line.rpartition(" ") for line in text.splitlines())}
    assert lines["Failed requests:"] == "2"
    assert lines["RESOURCE_EXHAUSTED:"] == lines["UNAVAILABLE:"] == "1"
    assert lines["Request goodput (req/s):"] == "0.50"
    assert lines["P99 ITL (ms):"] == "295.00"
    assert "Interrupted" not in text
    assert "Interrupted" in render(result(Run([], 0.0, num_unfinished=3)), summaries(options(), Run([], 0.0)))


def test_the_report_is_an_image_and_a_page(tmp_path: Path) -> None:
    mean = run()
    image, html = write_report(tmp_path / "d" / "r.1", mean, result(mean), summaries(options(), mean), {"seed": "0"})
    assert (image.name, html.name) == ("r.1.png", "r.1.html")
    assert image.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert "data:image/png;base64," in text
    assert "UNAVAILABLE" in text
    assert "src=" not in text.replace('src="data:', "")  # it needs nothing else
    assert "href" not in text


def test_report_of_a_run_that_measured_nothing(tmp_path: Path) -> None:
    of = Run([outcome(0.0, code="X")], 0.0, num_unfinished=5)
    write_report(tmp_path / "r", of, result(of), summaries(options(), of), {})


def test_report_escapes_what_came_from_outside() -> None:
    bad = "<script>"
    of = Run([outcome(0.0, code=bad)], 1.0)
    found = {**result(of), "model_id": bad}
    assert bad not in page(found, summaries(options(), of), {bad: bad}, b"")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match=r"needs matplotlib .*install 'pagewire\[bench\]'"):
        require_matplotlib()

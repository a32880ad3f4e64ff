"""Log lines in both forms: what they hold, and that each event is one line of JSON."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from pagewire.log import JsonFormatter, TextFormatter, setup_logging


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("engine.loop").makeRecord(
        "engine.loop", logging.WARNING, "f.py", 1, message, args, None, extra=extra
    )
    made.created = 1_700_000_000.25
    return made


def test_json() -> None:
    line = JsonFormatter("prefill").format(record("step %d\nfailed", 3, request_id="r1"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "process": "prefill",
        "logger": "engine.loop",
        "message": "step 3\nfailed",
        "request_id": "r1",
    }


def test_a_text_line_has_time_level_process_logger_and_fields() -> None:
    line = TextFormatter("prefill").format(record("step %d", 3, request_id="r1"))
    assert line == "2023-11-14T22:13:20.250Z WARNING prefill engine.loop: step 3 request_id=r1"


@pytest.mark.parametrize("formatter", [JsonFormatter("p"), TextFormatter("p")])
def test_traceback(formatter: logging.Formatter) -> None:
    event = record("failed")
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        event.exc_info = sys.exc_info()
    assert "ZeroDivisionError: oops" in formatter.format(event)


def test_setup_writes_to_stderr_at_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("router", level="warning", log_format="json")
    logging.getLogger("router").info("hidden")
    logging.getLogger("router").warning("shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["shown"]


def test_a_connection_that_went_away_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("decode", level="info")
    for name in ("grpc._cython.cygrpc", "engine.loop"):
        try:
            raise RuntimeError('Failed "execute_batch"')
        except RuntimeError:
            logging.getLogger(name).exception("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")
    gone, *bug = capsys.readouterr().err.splitlines()
    assert gone.split(" ", 1)[1] == (
        "INFO decode grpc._cython.cygrpc: a connection went away in the middle of its RPC: "
        "ExecuteBatchError raised in core by servicer method [/a/B]"
    )
    assert "ERROR" in bug[0]
    assert bug[1].startswith("Traceback")


def test_what_a_library_notes_in_every_record_is_not_printed() -> None:
    """Ray's record factory does so in each process that has imported it."""
    noted = record("step %d", 3, request_id="r1", _library_timestamp=1)
    for formatter in (JsonFormatter("prefill"), TextFormatter("prefill")):
        assert "_library" not in formatter.format(noted)

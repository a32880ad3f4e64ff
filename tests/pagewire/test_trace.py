"""The trace id out of a traceparent."""

import pytest

from pagewire.trace import log_fields, trace_id

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("traceparent", "wanted"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"01-{TRACE}-b7ad6b7169203331-01-more", TRACE),
        ("", ""),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", ""),
        (f"ff-{TRACE}-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-b7ad6b7169203331", ""),
    ],
)
def test_trace_id(traceparent: str, wanted: str) -> None:
    assert trace_id(traceparent) == wanted


def test_log_fields() -> None:
    assert log_fields("r", "") == {"request_id": "r"}
    assert log_fields("r", TRACE, attempt=2) == {"request_id": "r", "trace_id": TRACE, "attempt": 2}

"""What ties log lines together: a request's trace id in every process, an error's id beside its traceback."""

import re
import secrets

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id(traceparent: str) -> str:
    """The 32 hex digits of a `traceparent`; empty if there is none or it is malformed (or all zero, which is void)."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match is not None and match[1].strip("0") and not traceparent.startswith("ff") else ""


def log_fields(request_id: str, trace: str, **more: object) -> dict[str, object]:
    """The `extra` of a log line about one request; a trace id that is empty is left out."""
    return {"request_id": request_id} | ({"trace_id": trace} if trace else {}) | more


def new_error_id() -> str:
    """For an error whose traceback is in the log: both bear it."""
    return secrets.token_hex(6)

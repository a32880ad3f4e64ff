"""Errors: codes, details, and the way over a status and back."""

import grpc
import pytest
from google.rpc import error_details_pb2

from pagewire.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PagewireError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
    from_status,
)

EVERY_KIND = [
    (InvalidArgument("sampling.n", 65, "must be in 1 … 64"), "INVALID_ARGUMENT", {"BadRequest"}),
    (ResourceExhausted("full", retry_after_s=0.25), "RESOURCE_EXHAUSTED", {"RetryInfo", "QuotaFailure"}),
    (NotFound("no model 'x'", reason="MODEL"), "NOT_FOUND", {"ErrorInfo"}),
    (FailedPrecondition("differ", metadata={"a": "1", "b": "2"}), "FAILED_PRECONDITION", {"ErrorInfo"}),
    (Unavailable("no worker", retry_after_s=2), "UNAVAILABLE", {"RetryInfo"}),
    (DeadlineExceeded("late"), "DEADLINE_EXCEEDED", set()),
    (Cancelled("gone"), "CANCELLED", set()),
    (Unauthenticated("who?"), "UNAUTHENTICATED", set()),
    (Internal("bug", error_id="abc"), "INTERNAL", {"ErrorInfo"}),
]


@pytest.mark.parametrize(("error", "code", "details"), EVERY_KIND, ids=lambda value: type(value).__name__)
def test_code_and_details_survive_the_status(error: PagewireError, code: str, details: set[str]) -> None:
    status = error.to_status()
    assert grpc.StatusCode[code].value[0] == status.code
    back = from_status(status)
    assert (back.code, back.message, back.details) == (error.code, error.message, error.details)
    assert {type(detail).__name__ for detail in back.details} == details


def test_invalid_argument_names_field_value_and_limit() -> None:
    error = InvalidArgument("sampling.n", 65, "must be in 1 … 64")
    assert str(error) == "sampling.n = 65: must be in 1 … 64"
    (detail,) = error.details
    assert isinstance(detail, error_details_pb2.BadRequest)
    (violation,) = detail.field_violations
    assert (violation.field, violation.description) == ("sampling.n", "must be in 1 … 64; got 65")


def test_long_and_missing_values_are_not_repeated() -> None:
    assert len(str(InvalidArgument("text", "x" * 10_000, "is too long"))) < 150
    assert str(InvalidArgument("prompt", None, "must be given")) == "prompt: must be given"


def test_retry_delay() -> None:
    (detail, _) = ResourceExhausted("full", retry_after_s=0.25).details
    assert isinstance(detail, error_details_pb2.RetryInfo)
    assert detail.retry_delay.ToMilliseconds() == 250


class StatusError(grpc.RpcError):
    """An RPC error as either kind of channel raises it."""

    def __init__(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.NOT_FOUND

    def details(self) -> str:
        return "plain text"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


def test_rpc_error_with_without_and_with_garbled_details() -> None:
    with_details = from_rpc_error(StatusError(NotFound("rich text", reason="MODEL").metadata))
    assert (with_details.message, len(with_details.details)) == ("rich text", 1)
    for metadata in ((), (("grpc-status-details-bin", b"\xff\xff"),)):
        error = from_rpc_error(StatusError(metadata))
        assert (error.code, error.message, error.details) == (grpc.StatusCode.NOT_FOUND, "plain text", ())


def test_a_deadline_that_the_transport_saw_first_is_one_all_the_same() -> None:
    class Seen(StatusError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "Stream removed (Deadline Exceeded)"

    assert from_rpc_error(Seen(())).code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(("remaining", "code"), [(0.0, "DEADLINE_EXCEEDED"), (0.5, "INTERNAL"), (None, "INTERNAL")])
def test_a_reset_after_the_deadline_is_the_deadline(remaining: float | None, code: str) -> None:
    class Reset(StatusError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INTERNAL

        def details(self) -> str:
            return "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"

        def time_remaining(self) -> float | None:
            return remaining

    assert from_rpc_error(Reset(())).code.name == code

"""Errors as gRPC statuses with details (DESIGN §9), in both directions.

PagewireError                code, message
├── InvalidArgument          INVALID_ARGUMENT     BadRequest{field, description with value and limit}
├── ResourceExhausted        RESOURCE_EXHAUSTED   RetryInfo, QuotaFailure
├── NotFound                 NOT_FOUND            ErrorInfo
├── FailedPrecondition       FAILED_PRECONDITION  ErrorInfo
├── KvLoadFailed             ABORTED              ErrorInfo
├── Unavailable              UNAVAILABLE          RetryInfo
├── DeadlineExceeded         DEADLINE_EXCEEDED
├── Cancelled                CANCELLED
├── Unauthenticated          UNAUTHENTICATED
├── PermissionDenied         PERMISSION_DENIED    ErrorInfo{area that is needed}
└── Internal                 INTERNAL             ErrorInfo{id to find it in the log}
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from pagewire.trace import new_error_id

DOMAIN = "pagewire"
_STATUS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _as_any(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class PagewireError(Exception):
    """Any failure that has a gRPC code. `code`, `message` and `details` survive the wire."""

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, code: grpc.StatusCode | None = None, details: tuple[Message, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.details = details

    def to_status(self) -> status_pb2.Status:
        """The status as it travels."""
        return status_pb2.Status(
            code=self.code.value[0], message=self.message, details=[_as_any(detail) for detail in self.details]
        )

    @property
    def reason(self) -> str:
        """The ErrorInfo's reason; empty if there is none."""
        return next((each.reason for each in self.details if isinstance(each, error_details_pb2.ErrorInfo)), "")

    @property
    def rejection(self) -> str:
        """For metrics: what is full, else the status code's name."""
        quota = next((each for each in self.details if isinstance(each, error_details_pb2.QuotaFailure)), None)
        return self.code.name.lower() if quota is None else quota.violations[0].subject

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Trailing metadata that carries the details; empty without any."""
        return ((_STATUS_KEY, self.to_status().SerializeToString()),) if self.details else ()


class InvalidArgument(PagewireError):
    """A bad field. `field` is its path ("sampling.temperature"); `limit` says what is allowed ("must be at most 64").

    A `value` of None is not shown (for fields that are missing or too long to repeat).
    """

    default_code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = "" if value is None else f" = {_shorten(value)}"
        self.field = field
        self.limit = limit
        description = limit if value is None else f"{limit}; got {_shorten(value)}"
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
        super().__init__(
            f"{field}{shown}: {limit}", details=(error_details_pb2.BadRequest(field_violations=[violation]),)
        )


class ResourceExhausted(PagewireError):
    """Full now; the client should retry after `retry_after_s`. `subject` names what is full."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float = 1.0, subject: str = "queue") -> None:
        self.retry_after_s = retry_after_s
        violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=message)
        super().__init__(
            message,
            details=(_retry_info(retry_after_s), error_details_pb2.QuotaFailure(violations=[violation])),
        )


class NotFound(PagewireError):
    """No such model, adapter or ticket."""

    default_code = grpc.StatusCode.NOT_FOUND

    def __init__(self, message: str, *, reason: str = "NOT_FOUND", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message, details=(_error_info(reason, metadata),))


class FailedPrecondition(PagewireError):
    """Two parts do not fit, or a ticket's epoch is over."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(
        self, message: str, *, reason: str = "FAILED_PRECONDITION", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, details=(_error_info(reason, metadata),))


KV_LOAD_FAILED = "KV_LOAD_FAILED"
ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND"


class KvLoadFailed(PagewireError):
    """A decode worker could not get the KV of a request: another prefill worker has to make it again."""

    default_code = grpc.StatusCode.ABORTED

    def __init__(self, message: str) -> None:
        super().__init__(message, details=(_error_info(KV_LOAD_FAILED, None),))


class Unavailable(PagewireError):
    """No worker, or it was lost."""

    default_code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, details=(_retry_info(retry_after_s),))


class DeadlineExceeded(PagewireError):
    """Out of time."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(PagewireError):
    """The caller, or an operator, gave up."""

    default_code = grpc.StatusCode.CANCELLED


class Unauthenticated(PagewireError):
    """No token, or a wrong one."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(PagewireError):
    """A valid token that does not open the service. `area` is what it would need."""

    default_code = grpc.StatusCode.PERMISSION_DENIED

    def __init__(self, message: str, *, area: str) -> None:
        super().__init__(message, details=(_error_info("AREA_NOT_GRANTED", {"area": area}),))


class Internal(PagewireError):
    """A bug. `error_id` (made here if there is none yet) is in the message and in the log, beside the traceback."""

    default_code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, error_id: str = "") -> None:
        self.error_id = error_id or new_error_id()
        if self.error_id not in message:
            message = f"{message} (error id {self.error_id})"
        super().__init__(message, details=(_error_info("INTERNAL", {"error_id": self.error_id}),))


def renamed(error: PagewireError, field: re.Pattern[str], name: str) -> PagewireError:
    """The same error with `name` where its field begins with what `field` matches; others as they are."""
    details: list[Message] = []
    message = error.message
    for detail in error.details:
        if isinstance(detail, error_details_pb2.BadRequest):
            bad = error_details_pb2.BadRequest()
            bad.CopyFrom(detail)
            for violation in bad.field_violations:
                old, violation.field = violation.field, field.sub(name, violation.field, count=1)
                message = violation.field + message[len(old) :] if message.startswith(old) else message
            detail = bad
        details.append(detail)
    return error if message == error.message else PagewireError(message, code=error.code, details=tuple(details))


def from_status(status: status_pb2.Status) -> PagewireError:
    """A PagewireError with the status's code, message and those details that this process knows.

    The subclass tells a caller nothing that the code does not, so the plain class is returned.
    """
    known: tuple[type[Message], ...] = (
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        error_details_pb2.QuotaFailure,
        error_details_pb2.ErrorInfo,
    )
    details = []
    for packed in status.details:
        for kind in known:
            message = kind()
            if packed.Unpack(message):
                details.append(message)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return PagewireError(status.message, code=code, details=tuple(details))


# gRPC's transport reports a deadline as UNAVAILABLE if it sees it before the call does, and as INTERNAL if the server
# was faster and a proxy between them passed its reset on.
_DEADLINE_FROM_BELOW = "Stream removed (Deadline Exceeded)"
_RESET = "Stream removed (RST_STREAM"


def from_rpc_error(error: grpc.RpcError, rpc: Any = None) -> PagewireError:
    """What a caller gets for a failed RPC, sync or async; details are kept. `rpc`: which, unless the error knows."""
    # Both kinds of error have these methods; grpc's types do not say so.
    call: Any = error
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    text = (call.details() if hasattr(call, "details") else None) or str(code.value[1])
    if text == _DEADLINE_FROM_BELOW or (text.startswith(_RESET) and _has_no_time_left(rpc or error)):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    for key, value in (call.trailing_metadata() if hasattr(call, "trailing_metadata") else None) or ():
        if key == _STATUS_KEY:
            try:
                return from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                # A peer or proxy that garbles the details still told us code and message.
                break
    return PagewireError(text, code=code)


def _has_no_time_left(rpc: Any) -> bool:
    remaining = rpc.time_remaining() if hasattr(rpc, "time_remaining") else None
    return remaining is not None and remaining <= 0


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PagewireError) -> NoReturn:
    """Ends the RPC with the error's code, message and details."""
    await context.abort(error.code, error.message, error.metadata)
    raise AssertionError("context.abort returned")


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(max(0, round(seconds * 1e9)))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _error_info(reason: str, metadata: Mapping[str, str] | None) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=dict(metadata or {}))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"

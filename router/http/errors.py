"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} with the HTTP status of the gRPC code."""

import logging
import re

import grpc
from google.rpc import error_details_pb2
from starlette.responses import JSONResponse

from pagewire.errors import Internal, PagewireError
from pagewire.trace import new_error_id
from router.validate import PromptTooLong

logger = logging.getLogger(__name__)

_Code = grpc.StatusCode
# gRPC code -> (HTTP status, OpenAI's type); the statuses are those of google/rpc/code.proto.
_STATUS = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    _Code.OUT_OF_RANGE: (400, "invalid_request_error"),
    _Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, "invalid_request_error"),
    _Code.ABORTED: (409, "server_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.CANCELLED: (499, "server_error"),
    _Code.UNIMPLEMENTED: (501, "server_error"),
    _Code.UNAVAILABLE: (503, "server_error"),
    _Code.DEADLINE_EXCEEDED: (504, "server_error"),
}
_INTERNAL = (500, "server_error")

# Field paths of the gRPC API, in the order in which they are tried, as the HTTP API calls them.
_PARAMS = (
    (re.compile(r"^sampling\.structured_output(\.\w+)?"), "structured_outputs"),
    (re.compile(r"^chat\.tools_json\b"), "tools"),
    (re.compile(r"^beam_search\."), ""),
    (re.compile(r"^(sampling|text_options)\."), ""),
    (re.compile(r"^chat\.template_kwargs_json\b"), "chat_template_kwargs"),
    (re.compile(r"^chat\.messages\b"), "messages"),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^tokens\.token_ids\b"), "prompt"),
    (re.compile(r"^text$"), "prompt"),
)


class Refusal(Exception):
    """A request that HTTP itself refuses: its size, its type, its path."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def known_error(error: Exception, where: str) -> PagewireError | Refusal:
    """The error as it may be shown. Of a bug only an id goes out; the log has the rest beside the id."""
    if isinstance(error, PagewireError | Refusal):
        if isinstance(error, PagewireError) and error.code is _Code.INTERNAL:
            logger.error("%s: %s", where, error.message)
        return error
    error_id = new_error_id()
    logger.error("%s failed (error id %s)", where, error_id, exc_info=error, extra={"error_id": error_id})
    message = f"internal error {error_id} ({type(error).__name__}); the server's log has the traceback"
    return Internal(message, error_id=error_id)


def error_response(error: PagewireError | Refusal) -> JSONResponse:
    """The whole answer."""
    if isinstance(error, Refusal):
        return JSONResponse(error_body(error), error.status)
    headers = {}
    for detail in error.details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            seconds = detail.retry_delay.seconds + (detail.retry_delay.nanos > 0)
            headers["retry-after"] = str(seconds)
    if error.code is _Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), _STATUS.get(error.code, _INTERNAL)[0], headers)


def error_body(error: PagewireError | Refusal) -> dict[str, object]:
    """What the answer, or the event of a stream that broke, holds."""
    if isinstance(error, Refusal):
        return _body(error.message, "invalid_request_error", None, error.code)
    kind = _STATUS.get(error.code, _INTERNAL)[1]
    message, param = error.message, None
    code = None if kind == "invalid_request_error" else error.code.name.lower()
    if isinstance(error, PromptTooLong):
        code = "context_length_exceeded"
    for detail in error.details:
        if isinstance(detail, error_details_pb2.BadRequest) and detail.field_violations:
            field = detail.field_violations[0].field
            param = _param(field)
            message = param + message[len(field) :] if message.startswith(field) else message
            message = message.replace("sampling.", "")
        elif isinstance(detail, error_details_pb2.ErrorInfo) and detail.reason == "MODEL_NOT_FOUND":
            param, code = "model", "model_not_found"
    return _body(message, kind, param, code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _param(field: str) -> str:
    for pattern, name in _PARAMS:
        if pattern.search(field):
            return pattern.sub(name, field, count=1)
    return field

"""A request's body: of a bounded size, JSON, and of a model's shape; or an error that names what is wrong with it."""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from pagewire.errors import InvalidArgument
from pagewire.rpc import MAX_MESSAGE_BYTES
from router.http.connection import ClientGone
from router.http.errors import Refusal

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
BODY_SECONDS = 60.0

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_json(request: Request) -> dict[str, object]:
    """The JSON object that was sent; raises Refusal, InvalidArgument or ClientGone."""
    # Also keeps web pages from posting here without asking (a form needs no CORS preflight, JSON does).
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "the content type must be application/json", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large(int(length))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s", code="request_timeout") from None
    try:
        # Refuses what json.loads lets through and later breaks: half surrogate pairs, NaN, endless nesting.
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument("body", None, f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("body", None, "must be a JSON object")
    return value


def parse(cls: type[ModelT], value: dict[str, object]) -> ModelT:
    """The object as a model; raises InvalidArgument for the first field that does not fit."""
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    field = ""
    at: Any = value
    for part in problem["loc"]:
        if problem["type"] != "missing" and not _has(at, part):
            break  # which of a field's forms it does not have
        at = at[part] if _has(at, part) else None
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    if problem["type"] == "extra_forbidden":
        raise InvalidArgument(field, None, "is not a parameter of this endpoint")
    if problem["type"] == "missing":
        raise InvalidArgument(field, None, "is missing")
    message = problem["msg"].removeprefix("Value error, ")
    raise InvalidArgument(field, problem["input"], message[:1].lower() + message[1:])


def _has(at: Any, part: int | str) -> bool:
    return isinstance(at, list) if isinstance(part, int) else isinstance(at, dict) and part in at


async def _read(request: Request) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(size: int) -> Refusal:
    message = f"the body has {size} bytes or more, must be at most {MAX_BODY_BYTES}"
    return Refusal(413, message, code="request_too_large")

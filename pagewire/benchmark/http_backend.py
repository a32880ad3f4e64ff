"""Servers of OpenAI's HTTP API as a backend: completions or chat completions, by server-sent events."""

import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2

from pagewire.benchmark.backend import Delta, SendError, Served, Usage
from pagewire.benchmark.datasets import Chat, Sample
from pagewire.config import ConfigError

_OPEN_SECONDS = 30.0


class HttpBackend:
    """`path` is the endpoint's; whether it is chat depends on the samples. `verify` as httpx2 takes it.

    Raises ConfigError for a `base_url` that is none.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        model: str,
        asked: Mapping[str, Any],
        *,
        token: str | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        try:
            self._client = httpx2.AsyncClient(
                base_url=base_url,
                headers={"authorization": f"Bearer {token}"} if token else {},
                # The load alone says how many run at a time and for how long.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                timeout=None,
                verify=verify,
            )
        except httpx2.InvalidURL as error:
            raise ConfigError(f"base-url = {base_url}: is no URL: {error}") from None
        self._base_url = base_url
        self._path = path
        self._model = model
        self._asked = asked

    async def open(self) -> Served:
        try:
            response = await self._client.get("/v1/models", timeout=_OPEN_SECONDS)
            if not response.is_success:
                raise _refusal(response, response.content)
            models = {str(model["id"]): model for model in response.json()["data"]}
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _broken(error, f"{self._base_url}/v1/models") from None
        except (ValueError, KeyError, TypeError):
            raise SendError("INCOMPLETE", "the answer of /v1/models is not in OpenAI's form") from None
        name = self._model or next(iter(models), "")
        if name not in models:
            raise SendError("HTTP 404", f"the server has the models {list(models)}, not {name!r}")
        self._model = name
        limit = models[name].get("max_model_len")
        return Served(name, limit if isinstance(limit, int) else None)

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        is_whole = False
        try:
            async with self._client.stream(
                "POST", self._path, json=self._body(sample), headers={"x-request-id": request_id}
            ) as response:
                if not response.is_success:
                    raise _refusal(response, await response.aread())
                events = _Events()
                async for received in response.aiter_bytes():
                    for data in events.take(received):
                        if data == b"[DONE]":
                            is_whole = True
                        else:
                            yield _delta(json.loads(data))
                is_whole = is_whole or b"[DONE]" in events.take(b"\n")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _broken(error, self._path) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SendError("INCOMPLETE", "an event of the stream is not in OpenAI's form") from None
        if not is_whole:
            raise SendError("INCOMPLETE", "the stream ended before [DONE]")

    def _body(self, sample: Sample) -> dict[str, Any]:
        asked = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **self._asked}
        if isinstance(sample.prompt, Chat):
            return {**asked, "messages": sample.prompt.messages, "max_completion_tokens": sample.output_len}
        return {**asked, "prompt": sample.prompt, "max_tokens": sample.output_len}

    async def close(self) -> None:
        await self._client.aclose()


class _Events:
    """Data of server-sent events, one line each. A line ends at LF alone: JSON may contain other ends of lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, received: bytes) -> list[bytes]:
        """What is complete by now."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]


def _delta(event: dict[str, Any]) -> Delta:
    """What an event brings. Raises SendError for one that ends a stream that broke."""
    if (error := event.get("error")) is not None:
        raise SendError(str(error.get("code") or error.get("type") or "error"), str(error.get("message")))
    usage = None
    if (counts := event.get("usage")) is not None:
        cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = Usage(counts.get("prompt_tokens"), counts.get("completion_tokens"), cached)
    text, has_tokens = "", False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        visible = choice.get("text") or delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        text += visible
        has_tokens = has_tokens or bool(visible or thought or delta.get("tool_calls"))
    return Delta(has_tokens, text, usage)


def _refusal(response: httpx2.Response, content: bytes) -> SendError:
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace") or response.reason_phrase or "no reason given"
    return SendError(f"HTTP {response.status_code}", message)


def _broken(error: httpx2.HTTPError | httpx2.InvalidURL, where: str) -> SendError:
    return SendError(type(error).__name__, f"{where}: {error or 'the connection broke'}")

"""pagewire's own gRPC API as a backend."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pagewire.benchmark.backend import Delta, SendError, Served, Usage
from pagewire.benchmark.datasets import Chat, Sample
from pagewire.client import AsyncClient
from pagewire.completion import Chunk
from pagewire.errors import PagewireError

_OPEN_SECONDS = 30.0


class GrpcBackend:
    """`asked`: sampling parameters of every request; `security`: AsyncClient's arguments."""

    def __init__(self, target: str, model: str, asked: Mapping[str, Any], security: Mapping[str, Any]) -> None:
        self._client = AsyncClient(target, **security)
        self._target = target
        self._model = model
        self._asked = asked

    async def open(self) -> Served:
        try:
            models = await self._client.list_models(timeout=_OPEN_SECONDS)
        except PagewireError as error:
            raise SendError(error.code.name, error.message) from None
        found = [model for model in models if self._model in ("", model.name)]
        if not found:
            raise SendError("NOT_FOUND", f"{self._target} serves {[m.name for m in models]}, not {self._model!r}")
        if not found[0].ready:
            raise SendError("UNAVAILABLE", f"no worker of {found[0].name!r} can serve now")
        self._model = found[0].name
        return Served(found[0].name, found[0].max_model_len, found[0].vocab_size)

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        prompt = sample.prompt
        form: dict[str, Any] = {"chat": prompt.messages} if isinstance(prompt, Chat) else {"prompt": prompt}
        is_whole = False
        try:
            async for chunk in self._client.generate(
                **form, model=self._model, max_tokens=sample.output_len, request_id=request_id, **self._asked
            ):
                is_whole = is_whole or chunk.done
                yield Delta(bool(chunk.token_ids), chunk.text, _usage(chunk))
        except PagewireError as error:
            raise SendError(error.code.name, error.message) from None
        if not is_whole:
            raise SendError("INCOMPLETE", "the stream ended before its last message")

    async def close(self) -> None:
        await self._client.close()


def _usage(chunk: Chunk) -> Usage | None:
    counts = chunk.usage
    return None if counts is None else Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)

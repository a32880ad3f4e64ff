"""The Python client, sync and async: `Client("localhost:50051").generate("Hello")` yields text as it comes.

Requests are built (request_builder) and responses read (completion) by the same functions for both; the two classes
only differ in how they wait.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from pagewire import rpc
from pagewire.completion import Chunk, Completion, CompletionBuilder, chunk_from_proto
from pagewire.errors import from_rpc_error
from pagewire.request_builder import (
    Messages,
    Prompt,
    build_detokenize_request,
    build_generate_request,
    build_tokenize_request,
)
from pagewire.security import Security
from pagewire.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model, or an adapter of the model `parent`; `max_model_len` in tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    ready: bool
    parent: str = ""


def _models(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [
        ModelInfo(m.name, m.max_model_len, m.vocab_size, m.has_chat_template, m.ready, m.parent)
        for m in response.models
    ]


def _security(
    tls: bool, tls_ca: bytes | None, tls_cert: bytes | None, tls_key: bytes | None, token: str | None
) -> Security:
    tokens = (token,) if token else ()
    return Security(tls_cert, tls_key, tls_ca, tokens, system_roots=tls)


class Client:
    """Blocking client of a router. Thread-safe. Close it, or use it in a `with`."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        tls: bool = False,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        token: str | None = None,
    ) -> None:
        """`tls` verifies by the system's CAs, `tls_ca` by that PEM; `tls_cert` and `tls_key` are for mTLS."""
        security = _security(tls, tls_ca, tls_cert, tls_key, token)
        self._channel = rpc.sync_channel(target, security=security)
        self._metadata = security.metadata
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """Streams chunks; see `build_generate_request` for the options, `timeout` in seconds.

        Leaving the loop early cancels the request. Raises PagewireError.
        """
        request = build_generate_request(prompt, **options)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            for response in call:
                yield chunk_from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def complete(self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any) -> Completion:
        """Generates and returns everything at once; arguments as for `generate`."""
        builder = CompletionBuilder()
        for chunk in self.generate(prompt, timeout=timeout, **options):
            builder.add(chunk)
        return builder.build()

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        chat: Messages | None = None,
        model: str = "",
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids as `generate` would see them."""
        request = build_tokenize_request(
            prompt, chat, model, add_special_tokens, add_generation_prompt, chat_template_kwargs, tools
        )
        return list(self._call(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = build_detokenize_request(token_ids, model, skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request, timeout).text)

    def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """Models the router serves."""
        return _models(self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout))

    def close(self) -> None:
        """Ends the connection; requests that run are cancelled."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Make it on the event loop that uses it. Close it, or use it in an `async with`."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        tls: bool = False,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        token: str | None = None,
    ) -> None:
        """As for Client."""
        self._channel = rpc.channel(target, security=_security(tls, tls_ca, tls_cert, tls_key, token))
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """As Client.generate."""
        call = self._stub.Generate(build_generate_request(prompt, **options), timeout=timeout)
        try:
            async for response in call:
                yield chunk_from_proto(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, call) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Any
    ) -> Completion:
        """As Client.complete."""
        builder = CompletionBuilder()
        async for chunk in self.generate(prompt, timeout=timeout, **options):
            builder.add(chunk)
        return builder.build()

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        chat: Messages | None = None,
        model: str = "",
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        timeout: float | None = None,
    ) -> list[int]:
        """As Client.tokenize."""
        request = build_tokenize_request(
            prompt, chat, model, add_special_tokens, add_generation_prompt, chat_template_kwargs, tools
        )
        return list((await self._call(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """As Client.detokenize."""
        request = build_detokenize_request(token_ids, model, skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request, timeout)).text)

    async def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """As Client.list_models."""
        return _models(await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout))

    async def close(self) -> None:
        """Ends the connection; requests that run are cancelled."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

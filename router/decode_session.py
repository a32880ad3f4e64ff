"""Client of DecodeService.Session: one stream per decode worker carries the requests of this whole router.

A session that breaks fails all its requests at once (UNAVAILABLE); the next start opens a new stream.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from pagewire.errors import PagewireError, Unavailable, from_rpc_error, from_status
from pagewire.v1 import decode_pb2, decode_pb2_grpc
from router.request import Logprobs, Token, TransferSource, WorkerCall
from router.worker_wire import FINISH_REASONS, decode_request, logprobs

logger = logging.getLogger(__name__)

_Stream = grpc.aio.StreamStreamCall[decode_pb2.SessionRequest, decode_pb2.SessionResponse]


class DecodeListener(Protocol):
    """Who is told of a request's course. Plain calls on the event loop; they must not take long."""

    def decode_accepted(self, num_cached_tokens: int) -> None:
        """Admitted."""
        ...

    def decode_token(self, token: Token) -> None:
        """One token."""
        ...

    def decode_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """Those of the prompt's tokens from `start` on, before any token."""
        ...

    def decode_failed(self, error: PagewireError) -> None:
        """The worker refused, failed or was lost; nothing follows."""
        ...


@dataclass(slots=True)
class _Entry:
    listener: DecodeListener
    num_open_choices: int


class DecodeSession:
    """One stream to one decode worker. `closed` is called once, when the stream has ended for whatever reason."""

    def __init__(self, channel: grpc.aio.Channel, *, closed: Callable[["DecodeSession"], None]) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._entries: dict[int, _Entry] = {}
        self._next_handle = 1
        self._commands: asyncio.Queue[decode_pb2.SessionRequest] = asyncio.Queue()
        self._on_closed = closed
        self._open = True
        self._task = asyncio.get_running_loop().create_task(self._run(), name="decode-session")

    @property
    def is_open(self) -> bool:
        """False once the stream has broken: nothing may be started on it."""
        return self._open

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._entries)

    def start(self, call: WorkerCall, source: TransferSource | None, listener: DecodeListener) -> int:
        """Starts a request and returns its handle. Does not wait."""
        handle = self._next_handle
        self._next_handle = self._next_handle % 0xFFFFFFFF + 1
        num_finished = sum(choice.finished for choice in call.choices.values())
        start = decode_pb2.SessionStart(handle=handle, decode=decode_request(call, source))
        self._entries[handle] = _Entry(listener, call.sampling.n - num_finished)
        self._commands.put_nowait(decode_pb2.SessionRequest(start=start))
        return handle

    def cancel(self, handle: int) -> None:
        """Aborts a request; its listener hears nothing more. One that has ended is ignored."""
        if self._entries.pop(handle, None) is not None:
            self._commands.put_nowait(decode_pb2.SessionRequest(cancel=decode_pb2.SessionCancel(handle=handle)))

    async def close(self) -> None:
        """Ends the stream, which aborts what still runs on it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failure: PagewireError = Unavailable("the decode session was closed")
        try:
            await self._read(self._stub.Session())
            failure = Unavailable("the decode worker ended the session")
        except grpc.RpcError as error:
            failure = Unavailable(f"the decode session broke: {from_rpc_error(error).message}")
        except grpc.aio.UsageError as error:
            failure = Unavailable(f"the channel to the decode worker is of no use: {error}")
        except ValueError as error:
            failure = Unavailable(f"the decode worker sent columns of different lengths: {error}")
        finally:
            self._open = False
            self._on_closed(self)
            entries, self._entries = list(self._entries.values()), {}
            for entry in entries:
                entry.listener.decode_failed(failure)

    async def _read(self, stream: _Stream) -> None:
        writer = asyncio.get_running_loop().create_task(self._write(stream), name="decode-session-writer")
        try:
            async for response in stream:
                self._dispatch(response)
        finally:
            stream.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: _Stream) -> None:
        """Errors end the reader too, which knows the reason."""
        while True:
            command = await self._commands.get()
            try:
                await stream.write(command)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    def _dispatch(self, response: decode_pb2.SessionResponse) -> None:
        entries = self._entries
        for accepted in response.accepted:
            entry = entries.get(accepted.handle)
            if entry is not None:
                entry.listener.decode_accepted(accepted.num_cached_tokens)
        for found in response.prompt_logprobs:
            entry = entries.get(found.handle)
            if entry is not None:
                values = [logprobs(item) for item in found.prompt_logprobs.entries]
                entry.listener.decode_prompt_logprobs(found.prompt_logprobs.start, values)
        if response.handles:
            self._dispatch_tokens(response)
        for failure in response.failures:
            entry = entries.pop(failure.handle, None)
            if entry is not None:
                entry.listener.decode_failed(_failure(failure))

    def _dispatch_tokens(self, response: decode_pb2.SessionResponse) -> None:
        entries = self._entries
        finish_reasons = response.finish_reasons or [0] * len(response.handles)
        with_logprobs = {item.row: logprobs(item.logprobs) for item in response.logprobs}
        rows = zip(
            response.handles, response.choices, response.indexes, response.token_ids, finish_reasons, strict=True
        )
        for row, (handle, choice, index, token_id, finish) in enumerate(rows):
            entry = entries.get(handle)
            if entry is None:
                continue  # cancelled a moment ago
            if finish:
                entry.num_open_choices -= 1
                if entry.num_open_choices <= 0:
                    del entries[handle]
            entry.listener.decode_token(
                Token(choice, index, token_id, with_logprobs.get(row), FINISH_REASONS.get(finish))
            )


def _failure(message: decode_pb2.SessionFailure) -> PagewireError:
    """The status with its details if the worker sent one, else code and text."""
    status = status_pb2.Status(code=message.code, message=message.message)
    if message.status:
        try:
            status = status_pb2.Status.FromString(message.status)
        except DecodeError:
            logger.warning("a decode worker sent a status that cannot be read")
    return from_status(status)


class DecodeSessions:
    """The open session of each decode worker, by endpoint."""

    def __init__(self) -> None:
        self._sessions: dict[str, DecodeSession] = {}

    def get(self, endpoint: str, channel: grpc.aio.Channel) -> DecodeSession:
        """The worker's session; opened on first use and after a break."""
        session = self._sessions.get(endpoint)
        if session is None or not session.is_open:
            session = DecodeSession(channel, closed=lambda ended: self._forget(endpoint, ended))
            self._sessions[endpoint] = session
        return session

    async def close(self) -> None:
        """Ends all sessions."""
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))

    def _forget(self, endpoint: str, session: DecodeSession) -> None:
        if self._sessions.get(endpoint) is session:
            del self._sessions[endpoint]

"""Prefill and decode workers that follow a script: real gRPC servers, invented tokens, faults at exact moments.

The token at output position i of choice c for a prompt p is `expected(p, c, i)`, whoever computes it, as with the real
engine: so a stream that was migrated can be compared with one that was not.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from pagewire import rpc
from pagewire.errors import KvLoadFailed, PagewireError
from pagewire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.placement import Worker
from tests.ports import free_port

ROOT = b"r" * 32
BLOCK_SIZE = 4
FIRST_TEXT_TOKEN = 3
"""Below it are the special tokens of tests/tiny_tokenizers.py; 2 is EOS."""

Context = grpc.aio.ServicerContext[Any, Any]


def expected(prompt: Sequence[int], choice: int, index: int, *, vocab_size: int = 256) -> int:
    """The token at an output position; never a special one."""
    return FIRST_TEXT_TOKEN + (sum(prompt) * 7 + len(prompt) * 3 + choice * 31 + index * 11) % (vocab_size - 3)


@dataclass(slots=True)
class Script:
    """What a worker does to a request. `eos_at` is the output position that is EOS in every choice."""

    tokens: Callable[[Sequence[int], int, int], int] = expected
    eos_at: int | None = None
    refuse: grpc.StatusCode | None = None
    refuse_message: str = "no"
    refuse_with: PagewireError | None = None
    num_cached: int = 0
    delay: float = 0.0
    # Prefill: fail before accepted, after it; hang after accepted until cancelled.
    die_before_accept: bool = False
    die_after_accept: bool = False
    # Prefill: seconds between the first tokens and the end of the stream, which owns the blocks until then.
    linger: float = 0.0
    hang: bool = False
    # Prefill: done, and the lease has begun, before any answer is seen; cancellation comes too late.
    is_unheard: bool = False
    # Decode: the session breaks after this many tokens of a request (0: at the start), once.
    break_after: int | None = None
    # Decode: no KV comes through, so it computes everything itself.
    loses_the_pull: bool = False
    # Decode: no KV comes through, and it gives the request back, once for each number.
    gives_back: int = 0
    # Decode: a request fails alone after this many tokens, once.
    fail_after: int | None = None
    fail_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    # Decode: such an end waits for this, since what is still under way when it comes may be lost.
    heard: asyncio.Event | None = None

    def token(self, request: types_pb2.WorkerRequest, choice: int, index: int) -> types_pb2.TokenOutput:
        """One sampled token, with log-probabilities if they were asked for."""
        prompt = list(request.prompt_token_ids)
        stop = self.eos_at == index and not request.sampling.ignore_eos
        token_id = 2 if stop else self.tokens(prompt, choice, index)
        token = types_pb2.TokenOutput(choice=choice, index=index, token_id=token_id)
        if stop:
            token.finish_reason = types_pb2.FINISH_REASON_STOP
        if request.sampling.HasField("logprobs"):
            token.logprobs.logprob = -1.0 - index
            token.logprobs.rank = 1
        return token


@dataclass(slots=True)
class Ticket:
    """What a prefill worker remembers for decode, and how it was freed: by the router, with its stream, by decode."""

    first_tokens: list[types_pb2.TokenOutput]
    request_id: str = ""
    released: bool = False
    aborted: bool = False
    taken: bool = False
    computed: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedWorker:
    """Common parts: a server on a free port, WatchWorker, what was seen."""

    role = types_pb2.WORKER_ROLE_UNSPECIFIED

    def __init__(self, worker_id: str, script: Script | None = None, *, max_model_len: int = 128) -> None:
        self.worker_id = worker_id
        self.script = script or Script()
        self.incarnation = secrets.randbits(63)
        self.requests: list[types_pb2.WorkerRequest] = []
        self.num_cancelled = 0
        self.num_running = 0
        self.max_model_len = max_model_len
        self.port = free_port()
        self.draining = False
        self.num_resets = 0
        self.more_services: list[Callable[[grpc.aio.Server], None]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = rpc.build_server()
        self.port = rpc.bind(self._server, "127.0.0.1", self.port)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Watch(self), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(self), self._server)
        for add in self.more_services:
            add(self._server)
        self.add(self._server)
        await self._server.start()

    async def kill(self) -> None:
        """All streams break at once, as when the process dies."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """The same address, a new incarnation."""
        await self.kill()
        self.incarnation = secrets.randbits(63)
        await self.start()

    def add(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def worker(self) -> Worker:
        return Worker(self.worker_id, self.incarnation, self.endpoint, "n")

    def info(self) -> types_pb2.WorkerInfo:
        return types_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            endpoint=self.endpoint,
            model="tiny",
            fingerprint=types_pb2.Fingerprint(
                root=ROOT, layout_id="l", numerics_class="n", block_size=BLOCK_SIZE, block_bytes=[64]
            ),
            max_model_len=self.max_model_len,
            num_blocks=64,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            vocab_size=300,
        )


class _Watch(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def WatchWorker(
        self, request: worker_pb2.WatchWorkerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchWorkerResponse]:
        yield worker_pb2.WatchWorkerResponse(info=self._worker.info(), load=self._load())
        while True:
            await asyncio.sleep(0.05)
            yield worker_pb2.WatchWorkerResponse(load=self._load())

    def _load(self) -> types_pb2.WorkerLoad:
        return types_pb2.WorkerLoad(num_free_blocks=64, draining=self._worker.draining)


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        status = admin_pb2.WorkerStatus(info=self._worker.info(), num_cached_blocks=7)
        return admin_pb2.GetStatusResponse(process="prefill", workers=[status])

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        self._worker.num_resets += 1
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=5)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        self._worker.draining = True
        return admin_pb2.DrainResponse(num_requests=self._worker.num_running)

    async def ListCachedBlocks(
        self, request: admin_pb2.ListCachedBlocksRequest, context: Context
    ) -> admin_pb2.ListCachedBlocksResponse:
        return admin_pb2.ListCachedBlocksResponse(keys=[b"k" * 16, self._worker.worker_id.encode().ljust(16)], seq=3)


class ScriptedPrefill(ScriptedWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill worker. `tickets` shows what was handed out and released."""

    role = types_pb2.WORKER_ROLE_PREFILL

    def __init__(self, worker_id: str = "p0", script: Script | None = None, *, max_model_len: int = 128) -> None:
        super().__init__(worker_id, script, max_model_len=max_model_len)
        self.tickets: dict[bytes, Ticket] = {}
        self.seconds_left: list[float] = []

    async def restart(self) -> None:
        await self.kill()
        for ticket in self.tickets.values():
            ticket.aborted = True  # a new process knows nothing of them
        await super().restart()

    def add(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        script, call = self.script, request.request
        self.requests.append(call)
        self.seconds_left.append(context.time_remaining())
        self.num_running += 1
        ticket, ended = b"", False
        try:
            if script.refuse_with is not None:
                raise script.refuse_with
            if script.refuse is not None:
                await context.abort(script.refuse, script.refuse_message)
            if script.die_before_accept:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "died before accept")
            tokens = [script.token(call, choice, index) for choice, index in _to_sample(call)]
            ticket = secrets.token_bytes(16) if request.hand_off else b""
            if ticket:
                self.tickets[ticket] = Ticket(tokens, call.request_id)
            if script.is_unheard:
                ended = True
                await asyncio.Event().wait()
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(ticket=ticket))
            if script.hang:
                await asyncio.Event().wait()
            await asyncio.sleep(script.delay)
            if script.die_after_accept:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "died after accept")
            num_tokens = len(call.prompt_token_ids)
            progress = prefill_pb2.PrefillProgress(num_computed_tokens=num_tokens, num_cached_tokens=script.num_cached)
            if ticket:
                self.tickets[ticket].computed.set()
            yield prefill_pb2.PrefillResponse(progress=progress)
            first = prefill_pb2.FirstTokens(tokens=tokens, num_cached_tokens=script.num_cached)
            yield prefill_pb2.PrefillResponse(first_tokens=first)
            await asyncio.sleep(script.linger)
            ended = True
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
            if ticket and not ended:
                self.tickets[ticket].aborted = True

    async def ReleaseTicket(
        self, request: prefill_pb2.ReleaseTicketRequest, context: Context
    ) -> prefill_pb2.ReleaseTicketResponse:
        of_request = (name for name, each in self.tickets.items() if each.request_id == request.request_id)
        named = request.ticket or next(of_request, b"")
        ticket = self.tickets.get(named)
        released = ticket is not None and not ticket.released
        if ticket is not None:
            ticket.released = True
        return prefill_pb2.ReleaseTicketResponse(released=released)


def _to_sample(call: types_pb2.WorkerRequest) -> list[tuple[int, int]]:
    """(choice, index) of the tokens that a prefill samples: none of several choices that have output."""
    states = {state.choice: state for state in call.choices}
    finished = {choice for choice, state in states.items() if state.finished}
    still_open = [choice for choice in range(call.sampling.n) if choice not in finished]
    has_output = any(state.output_token_ids for state in call.choices)
    if has_output and len(still_open) > 1:
        return []
    return [(choice, len(states[choice].output_token_ids) if choice in states else 0) for choice in still_open]


@dataclass(slots=True)
class _Session:
    out: "asyncio.Queue[decode_pb2.SessionResponse | None]" = field(default_factory=asyncio.Queue)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class ScriptedDecode(ScriptedWorker, decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker. `sources` shows the tickets it was given; `peers` are the prefill workers it can pull from."""

    role = types_pb2.WORKER_ROLE_DECODE

    def __init__(
        self,
        worker_id: str = "d0",
        script: Script | None = None,
        *,
        peers: Sequence[ScriptedPrefill] = (),
        max_model_len: int = 128,
    ) -> None:
        super().__init__(worker_id, script, max_model_len=max_model_len)
        self.peers = peers
        self.sources: list[decode_pb2.TransferSource | None] = []
        self.num_tokens_sent = 0
        self.num_sessions = 0

    def add(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        session = _Session()
        self.num_sessions += 1
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (response := await session.out.get()) is not None:
                yield response
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scripted session breaks")
        finally:
            reader.cancel()
            tasks = list(session.running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest], session: _Session) -> None:
        with suppress(grpc.RpcError):
            async for request in requests:
                if request.HasField("start"):
                    work = self._decode(request.start, session)
                    session.running[request.start.handle] = asyncio.create_task(work)
                else:
                    task = session.running.pop(request.cancel.handle, None)
                    if task is not None and not task.done():
                        self.num_cancelled += 1
                        task.cancel()

    async def _decode(self, start: decode_pb2.SessionStart, session: _Session) -> None:
        script, call = self.script, start.decode.request
        self.requests.append(call)
        self.sources.append(start.decode.source if start.decode.HasField("source") else None)
        self.num_running += 1
        try:
            if script.refuse is not None:
                self._fail(start.handle, session, script.refuse, script.refuse_message)
                return
            error = script.refuse_with
            if script.gives_back and start.decode.HasField("source"):
                script.gives_back -= 1
                error = KvLoadFailed("KV failed")
            if error is not None:
                failure = decode_pb2.SessionFailure(
                    handle=start.handle, code=error.code.value[0], status=error.to_status().SerializeToString()
                )
                session.out.put_nowait(decode_pb2.SessionResponse(failures=[failure]))
                return
            accepted = decode_pb2.SessionAccepted(handle=start.handle, num_cached_tokens=script.num_cached)
            session.out.put_nowait(decode_pb2.SessionResponse(accepted=[accepted]))
            num_sent = 0
            for index, rows in await self._rows(start.decode):
                await asyncio.sleep(script.delay)
                if script.heard is not None and num_sent in (script.break_after, script.fail_after):
                    await script.heard.wait()
                if script.break_after is not None and num_sent >= script.break_after:
                    script.break_after = None
                    session.out.put_nowait(None)
                    return
                if script.fail_after is not None and num_sent >= script.fail_after:
                    script.fail_after = None
                    self._fail(start.handle, session, script.fail_code, "scripted failure")
                    return
                self._send(start.handle, session, rows)
                num_sent = index + 1
        finally:
            self.num_running -= 1
            session.running.pop(start.handle, None)

    async def _rows(self, decode: decode_pb2.DecodeRequest) -> list[tuple[int, list[types_pb2.TokenOutput]]]:
        """(step, tokens of all unfinished choices) until each is finished."""
        call = decode.request
        states = {choice.choice: choice for choice in call.choices}
        open_at = {}
        first = await self._first_tokens(decode.source) if decode.HasField("source") else {}
        for choice in range(call.sampling.n):
            if choice in states and states[choice].finished:
                continue
            num_outputs = len(states[choice].output_token_ids) if choice in states else 0
            if choice not in first or first[choice].index != num_outputs:
                open_at[choice] = num_outputs
            elif not first[choice].finish_reason:
                open_at[choice] = num_outputs + 1
        steps: list[tuple[int, list[types_pb2.TokenOutput]]] = []
        while open_at:
            rows = []
            for choice, index in list(open_at.items()):
                token = self.script.token(call, choice, index)
                if index + 1 >= call.sampling.max_tokens and not token.finish_reason:
                    token.finish_reason = types_pb2.FINISH_REASON_LENGTH
                rows.append(token)
                open_at[choice] = index + 1
                if token.finish_reason:
                    del open_at[choice]
            steps.append((len(steps), rows))
        return steps

    async def _first_tokens(self, source: decode_pb2.TransferSource) -> dict[int, types_pb2.TokenOutput]:
        """The end of the pull: it comes when prefill is done, and carries the first tokens."""
        peer = next(peer for peer in self.peers if peer.worker_id == source.worker_id)
        ticket = peer.tickets[source.ticket]
        if self.script.loses_the_pull:
            ticket.taken = True  # it still gives the ticket back
            return {}
        await ticket.computed.wait()
        ticket.taken = True
        return {token.choice: token for token in ticket.first_tokens}

    def _send(self, handle: int, session: _Session, rows: list[types_pb2.TokenOutput]) -> None:
        self.num_tokens_sent += len(rows)
        finishes = [row.finish_reason for row in rows]
        response = decode_pb2.SessionResponse(
            handles=[handle] * len(rows),
            choices=[row.choice for row in rows],
            indexes=[row.index for row in rows],
            token_ids=[row.token_id for row in rows],
            finish_reasons=finishes if any(finishes) else [],
        )
        for number, row in enumerate(rows):
            if row.HasField("logprobs"):
                response.logprobs.add(row=number, logprobs=row.logprobs)
        session.out.put_nowait(response)

    def _fail(self, handle: int, session: _Session, code: grpc.StatusCode, message: str) -> None:
        failure = decode_pb2.SessionFailure(handle=handle, code=code.value[0], message=message)
        session.out.put_nowait(decode_pb2.SessionResponse(failures=[failure]))

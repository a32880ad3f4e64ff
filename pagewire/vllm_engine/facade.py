"""VllmEngine as all processes answer it; what differs (Generate, load, cache) is a subclass's."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc

from pagewire.errors import InvalidArgument, PagewireError
from pagewire.foreign.smg import common_pb2, vllm_engine_pb2_grpc
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.vllm_engine.aborts import Aborts
from pagewire.vllm_engine.caller import caller_of
from pagewire.vllm_engine.kv_stream import KvEventStreams
from pagewire.vllm_engine.load import Limits, Load
from pagewire.vllm_engine.model_card import ModelCard

Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineFacade(vllm_engine_pb2_grpc.VllmEngineServicer, ABC):
    """A translator: whatever is decided is decided behind it."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._aborts = Aborts()
        self._started_at = time.monotonic()
        self._last_request_at = 0.0

    # --- what a process brings along ---

    @abstractmethod
    def load(self) -> Load:
        """Now."""

    @abstractmethod
    def limits(self) -> Limits:
        """Now: a router's change with its workers."""

    @abstractmethod
    def problem(self) -> str:
        """Why requests cannot be served; empty if they can."""

    @abstractmethod
    def server_info(self) -> pb.GetServerInfoResponse:
        """What pairs a prefill with a decode worker; the rest is filled in here."""

    @abstractmethod
    async def flush(self) -> int:
        """Forgets every cached prefix that nothing uses; returns how many blocks."""

    @abstractmethod
    def kv_events(self) -> KvEventStreams:
        """What the caches hold."""

    # --- the service ---

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if "" in request.request_ids:
            raise InvalidArgument("request_ids", "", "must not be empty: it would end all requests without an id")
        self._aborts.abort(caller_of(context), request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        problem = self.problem()
        return pb.HealthCheckResponse(healthy=not problem, message=problem or "healthy")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        limits = self.limits()
        return self._card.info(max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        info = self.server_info()
        info.server_type = "pagewire"
        info.active_requests = len(self._aborts)
        info.last_receive_timestamp = self._last_request_at
        info.uptime_seconds = time.monotonic() - self._started_at
        info.data_parallel_size = 1
        info.max_num_seqs = self.load().max_running
        return info

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        load = self.load()
        rank = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.num_pool_tokens,
            token_usage=load.kv_usage,
            utilization=min(1.0, load.num_running / load.max_running) if load.max_running else 0.0,
            max_running_requests=load.max_running,
            num_waiting_uncached_tokens=load.num_waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("pagewire"),
            dp_rank_count=1,
            loads=[rank] if request.dp_rank == 0 else [],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        await asyncio.to_thread(self._card.pack_tokenizer)
        for chunk in self._card.tokenizer_chunks():
            yield chunk

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Blocks of requests that run stay, so the answer says whether there were any after `timeout_s`."""
        deadline = time.monotonic() + max(0.0, request.timeout_s)
        # Workers are other processes, or other threads: there is no event to wait for.
        while (load := self.load()).num_running + load.num_waiting and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        num_blocks = await self.flush()
        num_left = load.num_running + load.num_waiting
        message = f"forgot {num_blocks} blocks" + (f"; those of {num_left} requests stay" if num_left else "")
        return common_pb2.FlushCacheResponse(success=not num_left, message=message)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncGenerator[common_pb2.KvEventBatch]:
        await context.send_initial_metadata(())
        async with aclosing(self.kv_events().follow(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise _unimplemented("Embed")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        raise _unimplemented("StartProfile")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        raise _unimplemented("StopProfile")

    def _note_request(self) -> None:
        self._last_request_at = time.time()


def _unimplemented(name: str) -> PagewireError:
    return PagewireError(f"pagewire has no {name}", code=grpc.StatusCode.UNIMPLEMENTED)

"""A prefill and a decode worker in one process, on real sockets, driven over stubs."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_svc.app import DecodeApp
from engine.engine import Engine
from engine.transfer.nixl_load import is_installed
from pagewire.config import EngineOptions, WorkerConfig
from pagewire.sampling import SamplingParams
from pagewire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from pagewire.wire import sampling_to_proto
from prefill_svc.app import PrefillApp
from tests.engine.tiers.costs import load_whatever_it_costs
from tests.ports import free_port

BLOCK_SIZE = 4
NUM_BLOCKS = 64
needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed (extra pagewire[nixl])")
NIXL = pytest.param("nixl", marks=needs_nixl)
_numbers = itertools.count()


def make_engine(model: Path, **overrides: Any) -> Engine:
    """A small engine; `num_blocks` sizes its pool."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "kernels": "reference",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "cpu_threads": 1,
        "kv_cache_memory_bytes": 1,
    } | overrides
    num_blocks = options.pop("num_blocks", NUM_BLOCKS)
    size = block_bytes(model, options["block_size"], options.get("kv_cache_dtype", "auto"))
    options["kv_cache_memory_bytes"] = num_blocks * size
    engine = Engine(EngineOptions(**options))
    load_whatever_it_costs(engine.tiers)
    return engine


def block_bytes(model: Path, block_size: int, kv_cache_dtype: str = "auto") -> int:
    from engine.memory import KV_FORMATS, KvLayout
    from engine.model_config import load_model_config

    config = load_model_config(str(model), dtype="float32")
    form = KV_FORMATS[kv_cache_dtype]
    return KvLayout.of(config, block_size, kv_format=form).block_bytes


@dataclass
class Cluster:
    """One prefill and one decode worker and stubs for both."""

    prefill: PrefillApp
    decode: DecodeApp
    prefill_engine: Engine
    decode_engine: Engine
    prefill_stub: Any
    decode_stub: Any
    ticket: bytes = b""

    def value(self, app: PrefillApp | DecodeApp, name: str, **labels: str) -> float:
        """A metric of a worker."""
        labels = {"model_name": app.description.model} | labels
        return app.registry.get_sample_value(name, labels) or 0.0

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choices: Sequence[types_pb2.ChoiceState] = (),
        **fields: Any,
    ) -> types_pb2.WorkerRequest:
        return types_pb2.WorkerRequest(
            request_id=f"r{next(_numbers)}",
            model=self.prefill.description.model,
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling_to_proto(params),
            choices=choices,
            **fields,
        )

    def source(self, ticket: bytes) -> decode_pb2.TransferSource:
        me = self.prefill.description
        return decode_pb2.TransferSource(
            endpoint=me.endpoint, worker_id=me.worker_id, incarnation=me.incarnation, ticket=ticket
        )

    async def prefill_all(self, request: types_pb2.WorkerRequest, hand_off: bool = True) -> prefill_pb2.FirstTokens:
        """A whole Prefill; `self.ticket` is its ticket."""
        call = self.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=hand_off))
        events = [event async for event in call]
        self.ticket = events[0].accepted.ticket
        return events[-1].first_tokens

    async def decode_all(self, request: types_pb2.WorkerRequest, ticket: bytes | None) -> list[list[int]]:
        """A whole Decode, its tokens by choice; with no ticket the decode worker prefills."""
        outputs: list[dict[int, int]] = [{} for _ in range(request.sampling.n or 1)]
        await self._decode(request, ticket, outputs)
        return [[output[index] for index in sorted(output)] for output in outputs]

    async def run(self, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
        """What a router does, in short: prefill, decode, and tokens put together by their index."""
        result = await self.run_all([(prompt, params)])
        return result[0]

    async def run_all(self, work: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[list[int]]]:
        return list(await asyncio.gather(*(self._run(prompt, params) for prompt, params in work)))

    async def _run(self, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
        outputs: list[dict[int, int]] = [{} for _ in range(params.n)]
        request = self.request(prompt, params)
        decoding: asyncio.Task[None] | None = None
        try:
            async for event in self.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)):
                if event.HasField("accepted"):
                    decoding = asyncio.create_task(self._decode(request, event.accepted.ticket, outputs))
                for token in event.first_tokens.tokens:
                    assert outputs[token.choice].setdefault(token.index, token.token_id) == token.token_id
            assert decoding is not None
            await decoding
        finally:
            if decoding is not None:
                decoding.cancel()
                await asyncio.gather(decoding, return_exceptions=True)
        for output in outputs:
            assert list(output) == sorted(output) == list(range(len(output)))
        return [list(output.values()) for output in outputs]

    async def _decode(
        self, request: types_pb2.WorkerRequest, ticket: bytes | None, outputs: list[dict[int, int]]
    ) -> None:
        source = None if ticket is None else self.source(ticket)
        message = decode_pb2.DecodeRequest(request=request, source=source)
        async for response in self.decode_stub.Decode(message):
            if response.HasField("token"):
                token = response.token
                assert outputs[token.choice].setdefault(token.index, token.token_id) == token.token_id

    async def check_nothing_is_held(self) -> None:
        """No reference, ticket, stream, intake or reservation is left on either side."""
        engines = (self.prefill_engine, self.decode_engine)
        await until(lambda: not (self.decode.worker.has_work or self.prefill.worker.has_work))
        await until(lambda: not any(engine.kv_cache.num_referenced for engine in engines))
        assert not len(self.decode.worker.reservations)
        assert not any(peer.held or peer.num_users for peer in self.decode.worker.peers.connected())
        for engine in engines:
            engine.kv_cache.check_integrity()
            await until(lambda engine=engine: not engine.memory.num_busy_lanes)


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Returns when the condition holds; AssertionError if it does not in time."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


class Gate:
    """Holds an engine before each step until it is let through."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine._runner
        self._permits = threading.Semaphore(0)
        self._open = False
        self.num_steps = 0
        engine._runner = self

    def execute(self, schedule: Any) -> Any:
        if not self._open:
            assert self._permits.acquire(timeout=60)
        self.num_steps += 1
        return self._runner.execute(schedule)

    def let(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release(1000)


@asynccontextmanager
async def cluster(
    model: Path,
    *,
    plane: str = "auto",
    lease_seconds: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """Checks at the end that nothing is held."""
    backing = {"kv_pool_backing": "memfd"} if plane == "shm_map" else {}
    prefill_engine = make_engine(model, **backing, **(prefill_options or {}))
    decode_engine = make_engine(model, **(decode_options or {}))
    common: dict[str, Any] = {"kv_transfer": plane, "kv_lease_seconds": lease_seconds} | config
    prefill = PrefillApp(
        WorkerConfig(role="prefill", port=free_port(), engine=prefill_engine.options, **common),
        prefill_engine,
        clock=clock,
    )
    decode = DecodeApp(WorkerConfig(role="decode", engine=decode_engine.options, **common), decode_engine)
    channels = [app.server.open_channel(app.description.endpoint) for app in (prefill, decode)]
    for app in (prefill, decode):
        await app.start()
        await app.server.server.start()
    started = Cluster(
        prefill,
        decode,
        prefill_engine,
        decode_engine,
        prefill_pb2_grpc.PrefillServiceStub(channels[0]),
        decode_pb2_grpc.DecodeServiceStub(channels[1]),
    )
    num_fds = len(os.listdir("/proc/self/fd"))
    try:
        yield started
        await started.check_nothing_is_held()
    finally:
        for channel in channels:
            await channel.close()
        await decode.stop()
        await prefill.stop()
        prefill_engine.close()
        decode_engine.close()
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def reference(
    model: Path, work: Sequence[tuple[Sequence[int], SamplingParams]], **options: Any
) -> list[list[list[int]]]:
    """The same work in one process without services."""
    engine = make_engine(model, **options)
    try:
        return [engine.generate([list(prompt)], params)[0] for prompt, params in work]
    finally:
        engine.close()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1, **more)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(10, 250, (length,), generator=generator)]

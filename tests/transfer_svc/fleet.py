"""Several prefill and decode workers in one process, on real sockets; a test plays the router and writes the hints."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from decode_svc.app import DecodeApp
from engine.engine import Engine
from pagewire.config import WorkerConfig
from pagewire.sampling import SamplingParams
from pagewire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from pagewire.wire import sampling_to_proto
from prefill_svc.app import PrefillApp
from tests.decode_svc.harness import make_engine, until
from tests.ports import free_port

_ROLES = {"prefill": types_pb2.WORKER_ROLE_PREFILL, "decode": types_pb2.WORKER_ROLE_DECODE}
_numbers = itertools.count()


@dataclass
class Node:
    """One worker: `name` is "p0", "d1" …"""

    name: str
    app: PrefillApp | DecodeApp
    engine: Engine
    channel: grpc.aio.Channel
    stopped: bool = False

    @property
    def worker(self) -> Any:
        return self.app.worker

    def value(self, name: str, **labels: str) -> float:
        """A metric."""
        labels = {"model_name": self.app.description.model} | labels
        return self.app.registry.get_sample_value(f"pagewire:{name}", labels) or 0.0

    def source(self, num_blocks: int = 1000, **changes: Any) -> types_pb2.PrefixSource:
        """A hint that this worker holds blocks."""
        me = self.app.description
        fields: dict[str, Any] = {
            "endpoint": me.endpoint,
            "worker_id": me.worker_id,
            "incarnation": me.incarnation,
            "num_blocks": num_blocks,
            "role": _ROLES[me.role],
        } | changes
        return types_pb2.PrefixSource(**fields)

    async def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            await self.channel.close()
            await self.app.stop()
            self.engine.close()


@dataclass
class Fleet:
    """Workers by name, and requests that go where a test says."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sources: Sequence[types_pb2.PrefixSource] = (),
        salt: str = "",
    ) -> types_pb2.WorkerRequest:
        return types_pb2.WorkerRequest(
            request_id=f"f{next(_numbers)}",
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling_to_proto(params),
            cache_salt=salt,
            prefix_sources=sources,
        )

    def ticket_of(self, name: str, ticket: bytes) -> decode_pb2.TransferSource:
        """Where decode finds a prefill's KV."""
        me = self[name].app.description
        return decode_pb2.TransferSource(
            endpoint=me.endpoint, worker_id=me.worker_id, incarnation=me.incarnation, ticket=ticket
        )

    async def prefill(
        self, name: str, request: types_pb2.WorkerRequest, hand_off: bool = False
    ) -> prefill_pb2.FirstTokens:
        """A whole Prefill."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self[name].channel)
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=hand_off))
        events = [event async for event in call]
        return events[-1].first_tokens

    async def decode(
        self, name: str, request: types_pb2.WorkerRequest, source: decode_pb2.TransferSource | None = None
    ) -> list[int]:
        """A whole Decode; without a source the worker prefills."""
        stub = decode_pb2_grpc.DecodeServiceStub(self[name].channel)
        tokens = {}
        async for response in stub.Decode(decode_pb2.DecodeRequest(request=request, source=source)):
            if response.HasField("token"):
                tokens[response.token.index] = response.token.token_id
        return [tokens[index] for index in sorted(tokens)]

    async def run(
        self,
        prefill: str,
        decode: str,
        prompt: Sequence[int],
        params: SamplingParams,
        sources: Sequence[types_pb2.PrefixSource] = (),
    ) -> list[int]:
        """A request through both workers, as a router does it."""
        request = self.request(prompt, params, sources)
        stub = prefill_pb2_grpc.PrefillServiceStub(self[prefill].channel)
        first, decoding = 0, None
        async for event in stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)):
            if event.HasField("accepted"):
                source = self.ticket_of(prefill, event.accepted.ticket)
                decoding = asyncio.create_task(self.decode(decode, request, source))
            elif event.HasField("first_tokens"):
                first = event.first_tokens.tokens[0].token_id
        assert decoding is not None
        return [first, *await decoding]

    async def check_nothing_is_held(self) -> None:
        """No reference, ticket, fetch or reservation is left anywhere."""
        alive = [node for node in self.nodes.values() if not node.stopped]
        for node in alive:
            await until(lambda node=node: not node.worker.has_work)
            await until(lambda node=node: not node.engine.kv_cache.num_referenced)
            assert not len(node.worker.leases)
            assert not len(node.worker.reservations)
            assert not node.worker.fetcher._flights
            assert not any(peer.held or peer.num_users for peer in node.worker.peers.connected())
            node.engine.kv_cache.check_integrity()


@asynccontextmanager
async def fleet(
    model: Path,
    names: Sequence[str],
    *,
    plane: str = "auto",
    mode: str = "always",
    min_tokens: int = 1,
    min_deadline: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    options: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """Checks at the end that nothing is held. `options`: of the engine, by worker name."""
    started = Fleet()
    backing = {"kv_pool_backing": "memfd"} if plane == "shm_map" else {}
    common: dict[str, Any] = {"kv_transfer": plane, "kv_fetch": mode, "kv_fetch_min_tokens": min_tokens} | config
    try:
        for name in names:
            await start_node(started, model, name, clock, backing | (options or {}).get(name, {}), common, min_deadline)
        yield started
        await started.check_nothing_is_held()
    finally:
        for node in started.nodes.values():
            await node.stop()


async def start_node(
    started: Fleet,
    model: Path,
    name: str,
    clock: Callable[[], float],
    options: dict[str, Any],
    common: dict[str, Any],
    min_deadline: float,
) -> None:
    engine = make_engine(model, **options)
    if name.startswith("p"):
        config = WorkerConfig(role="prefill", port=free_port(), worker_id=name, engine=engine.options, **common)
        app: PrefillApp | DecodeApp = PrefillApp(config, engine, clock=clock)
    else:
        config = WorkerConfig(role="decode", port=free_port(), worker_id=name, engine=engine.options, **common)
        app = DecodeApp(config, engine)
    fetcher = app.worker.fetcher
    fetcher.settings = replace(fetcher.settings, min_deadline=min_deadline)
    await app.start()
    await app.server.server.start()
    started.nodes[name] = Node(name, app, engine, grpc.aio.insecure_channel(app.description.endpoint))

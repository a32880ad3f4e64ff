"""Workers whose pools are device memory: prefill and decode in the interpreter, blocks by way of staging alone.

The pool's tensors are the CPU's, but the host sees them through lanes only: `buffer` has no rows, and lanes have two.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import device_staging
from engine.device_streams import HostStreams
from pagewire.config import ConfigError, WorkerConfig, load_config
from pagewire.v1 import decode_pb2
from tests.decode_svc.harness import BLOCK_SIZE, Cluster, block_bytes, cluster, greedy, until
from tests.e2e.oracle import MIN_MARGIN, Greedy, clear_greedy
from tests.tiny_models import VOCAB_SIZE
from transfer_svc import service

NUM_TOKENS = 3
LENGTH = 5 * BLOCK_SIZE + 2


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Greedy:
    """Hugging Face's tokens, each with a clear lead."""
    found = clear_greedy(model, LENGTH, NUM_TOKENS, vocab=VOCAB_SIZE, seed=4)
    assert found.margin > MIN_MARGIN
    return found


@pytest.fixture(autouse=True)
def _small_lanes(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_staging, "LANE_BYTES", 2 * block_bytes(model, BLOCK_SIZE))


TRITON = {"kernels": "triton", "num_blocks": 16}
BOTH: dict[str, Any] = {"prefill_options": TRITON, "decode_options": TRITON}


async def check(workers: Cluster, oracle: Greedy) -> None:
    assert await workers.run(oracle.prompt, greedy(NUM_TOKENS)) == [list(oracle.output)]
    assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0
    assert len(workers.prefill_engine.memory.buffer) == len(workers.decode_engine.memory.buffer) == 0


@pytest.mark.parametrize(
    ("plane", "parts"),
    [
        ("auto", False),
        pytest.param("grpc", True, marks=pytest.mark.nightly),
        *(pytest.param(plane, False, marks=pytest.mark.nightly) for plane in ("tcp", "grpc")),
    ],
)
async def test_tokens_are_hugging_faces(
    plane: str, parts: bool, model: Path, oracle: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts:  # blocks that don't fit into a frame
        monkeypatch.setattr(service, "FRAME_BYTES", 1000)
    async with cluster(model, plane=plane, **BOTH) as workers:
        await check(workers, oracle)
        (peer,) = workers.decode.worker.peers.connected()
        assert peer.plane.name == ("SHM_RING" if plane == "auto" else plane.upper())
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 6
        await check(workers, oracle)  # warm: what decode has is not sent again
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 7


class Gates(HostStreams):
    """Copies wait, on their own threads, until they may; `arrived` says that one does."""

    def __init__(self) -> None:
        self.may_copy, self.arrived = threading.Event(), threading.Event()
        self.may_copy.set()

    def run(self, number: int, launch: Callable[[], None]) -> None:
        self.arrived.set()
        assert self.may_copy.wait(60)
        super().run(number, launch)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gates]]:
    """Of the prefill worker's staging and of the decode worker's."""
    made: list[Gates] = []

    def open_streams(*_: object) -> Gates:
        made.append(Gates())
        return made[-1]

    monkeypatch.setattr(device_staging, "open_streams", open_streams)
    yield made
    for gate in made:
        gate.may_copy.set()


@pytest.mark.parametrize(
    ("side", "plane"),
    [
        (0, "shm_ring"),
        (1, "grpc"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((0, "grpc"), (1, "shm_ring"))),
    ],
)
async def test_cancelled_while_a_copy_is_in_flight(
    side: int, plane: str, model: Path, oracle: Greedy, gates: list[Gates]
) -> None:
    """The sender's copy out, or the receiver's copy in: no lane, block or ticket is left, and the next one comes."""
    async with cluster(model, plane=plane, **BOTH) as workers:
        request = workers.request(oracle.prompt, greedy(NUM_TOKENS))
        await workers.prefill_all(request)
        gate = gates[side]
        gate.may_copy.clear()
        gate.arrived.clear()
        engine = (workers.prefill_engine, workers.decode_engine)[side]
        call = workers.decode_stub.Decode(
            decode_pb2.DecodeRequest(request=request, source=workers.source(workers.ticket))
        )
        await call.read()
        await until(gate.arrived.is_set)
        call.cancel()
        await asyncio.sleep(0.05)
        assert engine.memory.num_busy_lanes == 1
        if side:
            assert engine.kv_cache.num_referenced > 0, "still being written"
        gate.may_copy.set()
        await workers.check_nothing_is_held()
        await check(workers, oracle)


async def test_a_ticket_that_ends_under_a_copy_is_not_sent(model: Path, oracle: Greedy, gates: list[Gates]) -> None:
    """What was copied may be somebody else's by then: decode hears that the ticket is gone, and computes."""
    async with cluster(model, plane="grpc", **BOTH) as workers:
        request = workers.request(oracle.prompt, greedy(NUM_TOKENS))
        await workers.prefill_all(request)
        gates[0].may_copy.clear()
        gates[0].arrived.clear()
        decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
        await until(gates[0].arrived.is_set)
        assert workers.prefill.worker.release_ticket(workers.ticket)
        memory, cache = workers.prefill_engine.memory, workers.prefill_engine.kv_cache
        cache.reset()
        memory.blocks.fill_(7.0)
        gates[0].may_copy.set()
        assert (await decoding)[0][-2:] == list(oracle.output[-2:])
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 0


async def test_blocks_are_marked_before_anybody_hears_of_them(
    model: Path, oracle: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that waits for the last mark comes after the step that wrote the block."""
    launched, marked = 0, 0

    class Counting(HostStreams):
        def mark(self) -> None:
            nonlocal marked
            marked = launched

    monkeypatch.setattr(device_staging, "open_streams", lambda *_: Counting())
    async with cluster(model, plane="grpc", prefill_options=TRITON) as workers:
        runner, collector = workers.prefill_engine._runner, workers.prefill.worker._collector
        execute, prepare = runner.execute, workers.prefill.worker._host._prepare
        heard = []

        def counted(schedule: Any) -> Any:
            nonlocal launched
            launched += 1
            return execute(schedule)

        def prepared(step: Any) -> Any:
            heard.append((launched, marked))
            return prepare(step)

        monkeypatch.setattr(runner, "execute", counted)
        monkeypatch.setattr(workers.prefill.worker._host, "_prepare", prepared)
        assert collector is not None
        await workers.prefill_all(workers.request(oracle.prompt, greedy(1)))
        assert workers.prefill.worker.release_ticket(workers.ticket)
    assert len(heard) >= 2
    assert all(launched == marked > 0 for launched, marked in heard)


@pytest.mark.parametrize("plane", ["nixl", "shm_vm", "shm_map"])
def test_planes_that_read_the_pool_are_refused(plane: str) -> None:
    flags = {"role": "decode", "model": "m", "kv_transfer": plane, "device": "cuda"}
    with pytest.raises(ConfigError, match=f"kv_transfer = {plane}: peers can't read a pool in device memory"):
        load_config(WorkerConfig, flags, None, {})

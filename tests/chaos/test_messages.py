"""Messages between prefill and decode that are lost, late, repeated, out of order or broken. 1P2D without Redis.

Whatever happens to a message, the tokens are right, nothing hangs, and nothing stays behind.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from engine.transfer.frames import decode_frame, encode_frame
from pagewire import AsyncClient
from pagewire.errors import PagewireError
from pagewire.v1 import transfer_pb2
from tests.chaos.oracle import Oracle, Stream, greedy, prompt, stream
from tests.chaos.relay import Call, Lost, Pass, Refused, Relay
from tests.chaos.system import System
from tests.chaos.test_death import busy, until
from tests.chaos.zygote import Zygote
from tests.ports import free_port

# Longer than a router needs to give up a silent decode worker (5 s), whose successor takes the ticket over.
LEASE_SECONDS = 9.0
FAILURES = "pagewire:transfer_failures_total"
OWN_PREFILL = "pagewire:prefill_tokens_on_decode_total"
PROMPT_LENGTH = 300  # 75 blocks: more than a frame has, so that a pull has two, however late it begins


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture(scope="module")
def relayed_system(
    zygote: Zygote, model: Path, relay: Relay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """Everybody reaches the prefill worker through the relay; blocks travel in frames."""
    with System(zygote, model, tmp_path_factory.mktemp("relayed")) as system:
        p0 = system.add_worker(
            "prefill", "p0", "--advertise", f"127.0.0.1:{relay.port}", "--kv-transfer", "grpc",
            "--kv-lease-seconds", str(LEASE_SECONDS), "--kv-max-hold-seconds", "60",
            "--kv-cache-memory-bytes", "800000",
        )  # fmt: skip
        p0.port = free_port()
        relay.target = p0.endpoint
        for name in ("d0", "d1"):
            system.add_worker("decode", name, "--kv-cache-memory-bytes", "800000")
        system.start()
        decoders = ",".join(system[name].endpoint for name in ("d0", "d1"))
        system.add_router("r0", "--prefill-workers", f"127.0.0.1:{relay.port}", "--decode-workers", decoders)
        system.restore()
        yield system


@pytest.fixture
def system(relayed_system: System, relay: Relay) -> Iterator[System]:
    relay.reset()
    yield relayed_system
    relay.reset()
    try:
        relayed_system.restore()
    except BaseException:
        print(relayed_system.logs())
        raise


@pytest_asyncio.fixture
async def client(system: System) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(system.target) as client:
        yield client


async def serve_while_one_is_lost(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle, method: str, number: int
) -> None:
    """Three requests, all right, although the first answer to `method` never arrives; then nothing is held."""
    lost: list[Call] = []

    def lose(call: Call, response: bytes) -> Pass:
        if call.method != method or lost:
            return (response,)
        lost.append(call)
        raise Lost

    relay.on_response = lose
    for i in range(3):
        ids = prompt(PROMPT_LENGTH, number + i)
        assert (await stream(client, ids, **greedy(12))).outputs == oracle(ids, **greedy(12))
    await until(lambda: lost)
    # What nobody could release ends with its lease.
    await until(lambda: not system.status("p0").tickets)


async def test_one_lost_handshake_wedges_nothing(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle
) -> None:
    """It comes first: decode workers that have shaken hands do not do it again."""
    await serve_while_one_is_lost(system, client, relay, oracle, "Handshake", 390)
    assert len([call for call in relay.calls if call.method == "Handshake"]) >= 2


class Meddler:
    """Does something to the `number`-th message of each of the first `times` pulls; `drop`, `repeat`, …"""

    def __init__(self, how: str, times: int, number: int = 2) -> None:
        self._how = how
        self._times = times
        self._number = number
        self._done: list[Call] = []
        self._held = b""

    @property
    def num_done(self) -> int:
        return len(self._done)

    def __call__(self, call: Call, response: bytes) -> Pass:
        if call.method != "Pull":
            return (response,)
        if self._held:
            held, self._held = self._held, b""
            return (response, held)
        if call.num_responses != self._number or len(self._done) >= self._times or decode_frame(response) is None:
            return (response,)
        self._done.append(call)
        if self._how == "reorder":
            self._held = response
            return ()
        return {"drop": (), "repeat": (response, response), "corrupt": (corrupt(response),), "cut": (response[:-7],)}[
            self._how
        ]


def corrupt(message: bytes) -> bytes:
    """One bit of the payload, which is at the end."""
    return message[:-100] + bytes((message[-100] ^ 4,)) + message[-99:]


REASONS = {"drop": "frame", "repeat": "frame", "reorder": "frame", "corrupt": "checksum", "cut": "frame"}


@pytest.mark.parametrize(
    ("how", "times"),
    [
        *(pytest.param(how, 1, id=f"{how} once") for how in REASONS),
        *(
            pytest.param(how, 100, id=f"{how} in every pull", marks=() if how == "corrupt" else pytest.mark.nightly)
            for how in REASONS
        ),
    ],
)
async def test_a_frame_is_hurt(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle, how: str, times: int
) -> None:
    """Once: the pull starts over behind what was verified. Always: what cannot be had is computed."""
    ids = prompt(PROMPT_LENGTH, 400 + 10 * list(REASONS).index(how) + times % 7)
    failures = sum(system[name].metric(FAILURES, reason=REASONS[how]) for name in ("d0", "d1"))
    computed = sum(system[name].metric(OWN_PREFILL) for name in ("d0", "d1"))
    # A later pull may have one frame alone, if prefill is done.
    relay.on_response = meddler = Meddler(how, times, number=2 if times == 1 else 1)
    result = await stream(client, ids, **greedy(12))
    assert result.outputs == oracle(ids, **greedy(12))
    assert meddler.num_done == (1 if times == 1 else 3)
    seen = sum(system[name].metric(FAILURES, reason=REASONS[how]) for name in ("d0", "d1")) - failures
    assert seen == meddler.num_done
    computed = sum(system[name].metric(OWN_PREFILL) for name in ("d0", "d1")) - computed
    assert (computed == 0) == (times == 1)


async def test_a_frame_of_an_older_epoch_comes_late(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle
) -> None:
    """A's frame turns up in B's pull, its blocks in the very places that B waits for: it is dropped."""
    kept: list[bytes] = []

    def keep(call: Call, response: bytes) -> Pass:
        if call.method == "Pull" and decode_frame(response) is not None:
            kept.append(response)
        return (response,)

    relay.on_response = keep
    await stream(client, prompt(PROMPT_LENGTH, 470), **greedy(4))
    late = kept[0]
    injected: list[Call] = []

    def inject(call: Call, response: bytes) -> Pass:
        if call.method != "Pull" or injected:
            return (response,)
        injected.append(call)
        return (late, response)

    relay.on_response = inject
    ids = prompt(PROMPT_LENGTH, 471)
    assert (await stream(client, ids, **greedy(12))).outputs == oracle(ids, **greedy(12))
    assert injected
    logs = system["d0"].log() + system["d1"].log()
    assert "a bad block, pulling it again: blocks of epoch" in logs


async def test_a_frame_with_somebody_elses_blocks(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle
) -> None:
    """The right ticket, epoch, place and checksum, other tokens' KV: the key tells."""
    kept: list[bytes] = []

    def keep(call: Call, response: bytes) -> Pass:
        if call.method == "Pull" and decode_frame(response) is not None:
            kept.append(response)
        return (response,)

    relay.on_response = keep
    await stream(client, prompt(PROMPT_LENGTH, 480), **greedy(4))
    theirs = decode_frame(kept[0])
    assert theirs is not None

    def swap(call: Call, response: bytes) -> Pass:
        frame = decode_frame(response) if call.method == "Pull" else None
        if frame is None or frame.first_block != 0:
            return (response,)
        return (
            encode_frame(
                type(frame)(
                    frame.ticket, frame.epoch, 0, theirs.checksums, theirs.keys, theirs.payload, offset=theirs.offset
                )
            ),
        )

    relay.on_response = swap
    ids = prompt(PROMPT_LENGTH, 481)
    assert (await stream(client, ids, **greedy(12))).outputs == oracle(ids, **greedy(12))
    assert sum(system[name].metric(FAILURES, reason="key") for name in ("d0", "d1")) == 1


@pytest.mark.parametrize("method", ["Attach", "Heartbeat", "Release"])
async def test_one_lost_acknowledgement_wedges_nothing(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle, method: str
) -> None:
    """The prefill worker did what it was asked; decode never hears of it."""
    await serve_while_one_is_lost(system, client, relay, oracle, method, 490 + 3 * len(method))


async def test_b10_an_error_of_prefill_reaches_the_client(system: System, client: AsyncClient, relay: Relay) -> None:
    """Its code and text, at once, although a decode worker waits for the KV of that prefill."""

    def fail(call: Call, response: bytes) -> Pass:
        if call.method == "Prefill" and call.num_responses == 3:
            raise Refused(grpc.StatusCode.INTERNAL, "prefill failed: out of luck")
        return (response,)

    relay.on_response = fail
    with pytest.raises(PagewireError, match="out of luck") as failure:
        await stream(client, prompt(PROMPT_LENGTH, 540), **greedy(12))
    assert failure.value.code is grpc.StatusCode.INTERNAL


async def test_a_partitioned_decode_worker_cannot_free_what_its_successor_reads(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle
) -> None:
    """d is frozen in mid-pull; its successor attaches; then d wakes up and goes on: with an epoch that is over."""
    ids, options = prompt(PROMPT_LENGTH, 550), greedy(12)
    expected = oracle(ids, **options)
    go_on = threading.Event()

    def calls(method: str) -> list[Call]:
        return [call for call in relay.calls if call.method == method]

    def hold(call: Call, response: bytes) -> Pass:
        # The first pull in its middle; the second, for which everything is there, at its first frame.
        if call.method == "Pull" and call.num_responses == (3 if call is calls("Pull")[0] else 1):
            go_on.wait(60)
        return (response,)

    relay.on_response = hold
    running = asyncio.ensure_future(stream(client, ids, **options))
    try:
        await until(lambda: any(call.num_responses == 3 for call in calls("Pull")))
        victim = busy(system, "d0", "d1")
        successor = "d1" if victim == "d0" else "d0"
        computed = system[successor].metric(OWN_PREFILL)
        system[victim].freeze()
        # The router notices its silence and gives the ticket to the other one.
        await until(lambda: len(calls("Attach")) == 2 and len(calls("Pull")) == 2)
        await until(lambda: calls("Pull")[1].num_responses == 1)
        held = system.status("p0").tickets[0]
        assert held.epoch == 2
        system[victim].thaw()
        # It learns that nobody wants it any more and gives back what it took for its own.
        await until(lambda: any(release(call).epoch == 1 for call in calls("Release")))
        ticket = system.status("p0").tickets[0]
        assert (ticket.epoch, ticket.num_blocks) == (2, held.num_blocks) == (2, PROMPT_LENGTH // 4)
    finally:
        go_on.set()
    result = await running
    assert result.outputs == expected
    assert result.decode_worker == successor
    # It had all of the prompt from prefill; the first token, which the client has, is one of its own.
    assert system[successor].metric(OWN_PREFILL) - computed <= 1


def release(call: Call) -> transfer_pb2.ReleaseRequest:
    return transfer_pb2.ReleaseRequest.FromString(call.request)


async def test_the_late_end_of_a_pull_that_nobody_waits_for(
    system: System, client: AsyncClient, relay: Relay, oracle: Oracle
) -> None:
    """The client leaves in mid-pull; what comes then finds its blocks in other hands, and they stay right."""
    go_on = threading.Event()

    def hold(call: Call, response: bytes) -> Pass:
        if call.method == "Pull" and call.num_responses == 3 and not go_on.is_set():
            go_on.wait(20)
        return (response,)

    relay.on_response = hold
    running = asyncio.ensure_future(stream(client, prompt(PROMPT_LENGTH, 560), **greedy(12)))
    await until(lambda: any(c.method == "Pull" and c.num_responses == 3 for c in relay.calls))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not any(system.status(name).num_referenced_blocks for name in ("p0", "d0", "d1")))
    others = [asyncio.ensure_future(stream(client, prompt(100, 561 + i), **greedy(12))) for i in range(4)]
    go_on.set()
    results: list[Stream] = list(await asyncio.gather(*others))
    for i, result in enumerate(results):
        assert result.outputs == oracle(prompt(100, 561 + i), **greedy(12))

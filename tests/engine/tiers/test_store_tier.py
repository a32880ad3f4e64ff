"""A store that workers share, on a real Valkey: what one computed another loads; whatever it does costs only hits."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from engine.rates import Rate
from engine.tiers.load import TierLoad
from engine.tiers.store_erase import keys_after
from engine.tiers.store_format import StoreFormat
from engine.tiers.store_tier import StoreSettings, StoreTier
from engine.tiers.store_writer import MAX_PENDING
from kvstore.block_store import BlockName, BlockStore, Heads, Stored, StoreError
from kvstore.redis_connection import RedisTarget
from kvstore.redis_store import RedisBlockStore
from kvstore.tier_block import Owned
from kvstore.tier_chain import Place, TierChain
from tests.certificates import make_authority, make_certificate
from tests.engine.harness import Harness, prompt_of
from tests.ports import free_port
from tests.valkey import Server, is_installed

pytestmark = pytest.mark.timeout(240)

MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
PROMPT = prompt_of(22, salt=3)  # five full blocks and a rest
WAIT = 60.0


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def server(valkey: Server) -> Server:
    valkey.command("FLUSHALL")
    return valkey


class Worker(Harness):
    """A harness with a store, to which loading is never too dear, and never too slow."""

    @property
    def tier(self) -> StoreTier:
        assert self.tiers is not None
        assert self.tiers.store is not None
        return self.tiers.store

    def ask_and_run(self, name: str, prompt: list[int] = PROMPT, salt: str = "") -> dict[str, int]:
        """Runs the prompt to its end; returns what came from which tier."""
        self.ask(name, prompt, max_tokens=4, cache_salt=salt)
        self.run()
        assert self.tiers is not None
        assert self.tiers.quiesce()
        return self.loaded[name]


@contextmanager
def worker(
    server: Server,
    model: bytes = MODEL,
    max_blocks: int = 1000,
    wrap: Callable[[BlockStore], BlockStore] = lambda store: store,
    url: str | None = None,
    **more: int,
) -> Iterator[Worker]:
    """Checked at the end, as a worker that shuts down is."""

    def make(block_size: int, block_bytes: int) -> tuple[BlockStore, StoreFormat]:
        store = RedisBlockStore(RedisTarget.parse(url or server.url), model, max_blocks)
        return wrap(store), StoreFormat(model, block_size, block_bytes)

    harness = Worker(num_blocks=16, store=make, **more)
    harness.tier.settings = StoreSettings(min_deadline=WAIT)
    assert harness.tiers is not None
    try:
        yield harness
        harness.run()
        harness.check_outputs()
    except BaseException:
        harness.tiers.close()
        raise
    harness.check_idle()


def values(server: Server) -> list[bytes]:
    """Names of what is stored."""
    found = server.command("KEYS", "pwkv:*")
    assert isinstance(found, list)
    return sorted(name for name in found if not name.endswith(b"}:use"))


def name_of(harness: Harness, number: int, model: bytes = MODEL) -> bytes:
    """Where the prompt's block lies."""
    return b"pwkv:{%b}:" % model[:16].hex().encode() + harness.cache.keys_for(PROMPT)[number]


def test_another_worker_loads_what_one_has_computed(server: Server) -> None:
    with worker(server) as first, worker(server) as second:
        assert first.ask_and_run("computes") == {}
        assert second.ask_and_run("loads") == {"store": 20}
        assert second.cached["loads"] == 20
        assert second.tier.counts()[1]["stored"] == 0, "it is all there"
        assert first.tier.counts()[0] >= 5


def test_the_store_is_behind_host_memory(server: Server) -> None:
    """Evicted from the device and from the host: the rest of the chain comes from the store."""
    with worker(server, num_host_blocks=3) as harness:
        harness.ask_and_run("first")
        harness.cache.reset()
        assert harness.ask_and_run("again") == {"host": 12, "store": 8}


@pytest.mark.parametrize("num_tokens", [4, 5, 8, 9])
def test_a_full_hit_leaves_a_token_to_compute(server: Server, num_tokens: int) -> None:
    """CASES F9: through the store too."""
    with worker(server) as harness:
        prompt = prompt_of(num_tokens)
        harness.ask_and_run("first", prompt)
        harness.cache.reset()
        harness.ask_and_run("again", prompt)
        assert harness.cached["again"] == min(num_tokens // 4 * 4, num_tokens - 1)


def test_another_model_and_another_tenant_find_nothing(server: Server) -> None:
    """CASES D3, D5."""
    with worker(server) as harness, worker(server, OTHER_MODEL) as foreign:
        harness.ask_and_run("first", salt="a")
        assert foreign.ask_and_run("foreign", salt="a") == {}
        harness.cache.reset()
        assert harness.ask_and_run("b", salt="b") == {}
        harness.cache.reset()
        assert harness.ask_and_run("a", salt="a") == {"store": 20}
        assert not [value for value in values(server) if b"salt" in value]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the block": lambda value: value[:-3] + bytes([value[-3] ^ 1]) + value[-2:],
    "a bit of the record": lambda value: value[:80] + bytes([value[80] ^ 1]) + value[81:],
    "its fingerprint": lambda value: value[:8] + b"o" * 32 + value[40:],
    "its end": lambda value: value[:-1],
    "more than it": lambda value: value + b"x",
    "everything": lambda value: os.urandom(len(value)),
    "no bytes": lambda value: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_is_never_believed(server: Server, damage: str) -> None:
    """CASES F12: what comes before it is used, it is computed and stored again."""
    with worker(server) as first, worker(server) as second:
        first.ask_and_run("first")
        name = name_of(first, 2)
        value = server.command("GET", name)
        assert isinstance(value, bytes)
        server.command("SET", name, DAMAGES[damage](value))
        assert second.ask_and_run("again") == {"store": 8}
        assert second.tier.num_corrupt == 1
        assert server.command("GET", name) == value
        second.cache.reset()
        assert second.ask_and_run("right") == {"store": 20}


def test_another_blocks_value_is_never_believed(server: Server) -> None:
    """Right in itself, but of other tokens."""
    with worker(server) as harness:
        harness.ask_and_run("first")
        value = server.command("GET", name_of(harness, 1))
        assert isinstance(value, bytes)
        server.command("SET", name_of(harness, 3), value)
        harness.cache.reset()
        assert harness.ask_and_run("again") == {"store": 12}
        assert harness.tier.num_corrupt == 1


def test_a_lost_value_ends_the_chain(server: Server) -> None:
    with worker(server) as harness:
        harness.ask_and_run("first")
        server.command("DEL", name_of(harness, 3))
        harness.cache.reset()
        assert harness.ask_and_run("again") == {"store": 12}
        harness.cache.reset()
        assert harness.ask_and_run("healed") == {"store": 20}


class Gate:
    """A store in front of which one kind of question waits until it may."""

    def __init__(self, store: BlockStore, held: str) -> None:
        self._store = store
        self._held = held
        self.may_go_on, self.arrived = threading.Event(), threading.Event()

    def __str__(self) -> str:
        return str(self._store)

    @property
    def max_batch(self) -> int:
        return self._store.max_batch

    async def touch(self, names: Sequence[BlockName]) -> list[bool]:
        return await self._store.touch(names)

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._wait("get")
        return await self._store.get(keys)

    async def put(self, values: Sequence[tuple[BlockName, bytes]]) -> Stored:
        await self._wait("put")
        return await self._store.put(values)

    async def heads(self, cursor: int, num_bytes: int) -> Heads:
        return await self._store.heads(cursor, num_bytes)

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._store.delete(keys)

    async def close(self) -> None:
        await self._store.close()

    async def _wait(self, what: str) -> None:
        if what == self._held and not self.may_go_on.is_set():
            self.arrived.set()
            await asyncio.to_thread(self.may_go_on.wait, WAIT)


def test_others_pass_who_waits_for_the_store(server: Server) -> None:
    """CASES E3; and equal prompts wait for one load."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "get"))
        return gates[0]

    with worker(server) as first, worker(server, wrap=wrap) as second:
        first.ask_and_run("first")
        second.ask("loads", PROMPT, max_tokens=1)
        second.ask("waits", PROMPT, max_tokens=1)
        second.step()
        assert gates[0].arrived.wait(WAIT)
        second.ask("passes", 6, max_tokens=2)
        while ("passes", 0) not in second.reasons:
            second.step()
        assert "loads" not in second.cached
        gates[0].may_go_on.set()
        second.run()
        assert second.loaded["loads"] == {"store": 20}
        assert (second.cached["waits"], second.loaded["waits"]) == (20, {})


def test_an_abort_during_a_load_gives_the_blocks_back(server: Server) -> None:
    """CASES A4: not while somebody still writes to them."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "get"))
        return gates[0]

    with worker(server) as first, worker(server, wrap=wrap) as second:
        first.ask_and_run("first")
        second.ask("gone", PROMPT, max_tokens=1)
        second.step()
        assert gates[0].arrived.wait(WAIT)
        assert second.abort("gone")
        assert second.cache.num_referenced == 5
        gates[0].may_go_on.set()
        assert second.tiers is not None
        assert second.tiers.quiesce()
        assert second.cache.num_referenced == 0


@pytest.mark.parametrize("when", ["get", "put"])
def test_a_server_that_dies_in_the_middle_costs_only_hits(when: str) -> None:
    """CASES F12: SIGKILL while blocks are on their way; when it is back, so are the hits."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, when))
        return gates[-1]

    with Server() as server, worker(server) as first, worker(server, wrap=wrap) as second:
        if when == "get":
            first.ask_and_run("first")
        second.ask("meanwhile", PROMPT, max_tokens=4)
        second.step()
        if when == "put":
            second.run()
        assert gates[0].arrived.wait(WAIT)
        server.kill()
        gates[0].may_go_on.set()
        second.run()
        assert second.loaded["meanwhile"] == {}
        assert second.tiers is not None
        assert second.tiers.quiesce()
        assert second.tier.counts()[1]["failed"] >= 1
        server.restart()
        for harness in (first, second):
            harness.cache.reset()
        _until_it_loads(second)


def test_a_frozen_server_holds_up_nobody_for_long(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP: the connection stands and nobody answers. The first request waits a moment, the others do not."""
    with worker(server) as harness:
        harness.ask_and_run("first")
        harness.cache.reset()
        harness.tier.settings = StoreSettings(min_deadline=0.05, slack=1e-9)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert harness.ask_and_run("frozen") == {}
            assert not harness.tier.wants(5)
            harness.cache.reset()
            assert harness.ask_and_run("at once") == {}
            assert "did not answer in" in caplog.text
        finally:
            os.kill(server.pid, signal.SIGCONT)
        harness.tier.settings = StoreSettings(min_deadline=WAIT)
        _until_it_loads(harness)


@pytest.mark.skipif(not (is_installed("redis-server") and shutil.which("openssl")), reason="nobody speaks TLS here")
def test_closing_beside_a_frozen_server_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers the TLS good-bye."""
    monkeypatch.setenv("SSL_CERT_FILE", str(make_authority(tmp_path)))
    certificate, key = make_certificate(tmp_path, "server")
    port = free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with Server("redis-server", ("--tls-port", str(port), *files)) as server:
        try:
            with worker(server, url=f"rediss://127.0.0.1:{port}") as harness:
                harness.ask_and_run("first")
                harness.cache.reset()
                assert harness.ask_and_run("again") == {"store": 20}
                os.kill(server.pid, signal.SIGSTOP)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert not _store_threads()


def test_a_store_that_cannot_be_closed_holds_up_nothing_else(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Gate):
        async def close(self) -> None:
            await super().close()
            raise RuntimeError("broken")

    with worker(server, wrap=lambda store: Broken(store, ""), num_host_blocks=3) as harness:
        harness.ask_and_run("first")
    assert "could not be closed" in caplog.text
    assert not _store_threads()


def test_the_rest_is_closed_when_something_cannot_be(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    with worker(server, num_host_blocks=3) as harness:
        assert harness.tiers is not None
        close_store, close_slots = harness.tier.close, harness.tiers.tiers[0].slots.close

        def fail() -> None:
            close_store()
            raise RuntimeError("broken")

        monkeypatch.setattr(harness.tier, "close", fail)
        monkeypatch.setattr(harness.tiers.tiers[0].slots, "close", lambda: (closed.append(1), close_slots()))
        with pytest.raises(RuntimeError, match="broken"):
            harness.tiers.close()
        assert closed
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tier-")]
        monkeypatch.undo()
        harness.tiers = None


def _store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tier-store"]


def test_a_store_that_is_too_slow_is_learned_and_still_written(server: Server) -> None:
    """Its quick answers what is there do not hide that blocks do not come."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "get"))
        return gates[0]

    with worker(server) as first, worker(server, wrap=wrap) as second:
        first.ask_and_run("first")
        second.tier.settings = StoreSettings(min_deadline=0.2, slack=1e-9)
        assert second.ask_and_run("too slow") == {}
        gates[0].may_go_on.set()
        assert second.tier.costs.load_seconds(1, time.monotonic()) >= 0.3, "twice as long as it waited"
        events = second.tier.counts()[1]
        assert (events["late"], events["failed"]) == (1, 0)
        second.ask_and_run("another", prompt_of(22, salt=40))
        assert second.tier.counts()[1]["stored"] >= 5


def test_the_wait_for_a_turn_is_in_the_deadline(server: Server) -> None:
    """Who comes while four others load waits no longer than it may."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "get"))
        return gates[0]

    with worker(server) as first, worker(server, wrap=wrap) as second:
        first.ask_and_run("first")
        loads = []
        for _ in range(5):
            block_ids = second.cache.allocate(1)
            assert block_ids is not None
            keys = second.cache.keys_for(PROMPT)
            loads.append(
                TierLoad(
                    second.cache, [], block_ids, [Place(0)], keys=keys, token_ids=PROMPT, chain=TierChain(), places=[]
                )
            )
        for load in loads[:4]:
            second.tier.start(load, lambda: None)
        second.tier.settings = StoreSettings(min_deadline=0.1, slack=1e-9)
        second.tier.start(loads[4], lambda: None)
        loads[4].done.result(WAIT / 2)
        assert not any(load.is_done for load in loads[:4])
        gates[0].may_go_on.set()
        for load in loads:
            load.done.result(WAIT)
            load.abandon()
        assert [load.num_loaded for load in loads] == [1, 1, 1, 1, 0]


def _until_it_loads(harness: Worker) -> None:
    """Asks again and again, as after an outage."""
    until = time.monotonic() + WAIT
    for number in range(10_000):
        harness.cache.reset()
        if harness.ask_and_run(f"again{number}") == {"store": 20}:
            return
        assert time.monotonic() < until, "it never recovers"
        time.sleep(0.05)


def test_a_full_server_costs_only_hits() -> None:
    """maxmemory without eviction, taken by others."""
    limits = ("--maxmemory", "5mb", "--maxmemory-policy", "noeviction")
    with Server(arguments=limits) as server, worker(server) as harness:
        harness.ask_and_run("first")
        server.fill(50_000)
        harness.cache.reset()
        assert harness.ask_and_run("again") == {"store": 20}, "it still reads"
        for number in range(300):
            harness.ask_and_run(f"more{number}", prompt_of(30, salt=number))
            if harness.tier.counts()[1]["failed"]:
                break
        assert harness.tier.counts()[1]["failed"] >= 1


def test_it_never_holds_more_than_its_size(server: Server) -> None:
    with worker(server, max_blocks=6) as harness:
        for number in range(4):
            harness.ask_and_run(f"other{number}", prompt_of(22, salt=30 + number))
        assert len(values(server)) == 6
        num_blocks, events = harness.tier.counts()
        assert num_blocks == 6
        assert events["evicted"] >= 12


def test_what_is_dearer_than_computing_is_not_loaded(server: Server) -> None:
    with worker(server) as harness:
        harness.ask_and_run("first")
        harness.cache.reset()
        harness.tier.costs.prefill = Rate(1e12, 1e9)
        assert not harness.tier.wants(5)
        assert harness.ask_and_run("computed") == {}
        harness.cache.reset()
        num_asked, wants = 0, harness.tier.wants

        def asks(num_blocks: int, num_loaded: int) -> bool:
            nonlocal num_asked
            num_asked += 1
            return True

        harness.tier.wants = asks  # type: ignore[method-assign]
        assert harness.ask_and_run("declined") == {}
        assert num_asked
        assert harness.tier.counts()[1]["declined"] == 5
        harness.tier.wants = wants  # type: ignore[method-assign]


def test_a_tenants_blocks_are_erased_for_the_whole_fleet(server: Server) -> None:
    with worker(server) as first, worker(server) as second:
        for salt in ("a", "b"):
            first.ask_and_run(f"first {salt}", salt=salt)
        assert second.tiers is not None
        assert second.tiers.clear(Owned.by_tenant("a")) >= 5
        assert second.ask_and_run("a", salt="a") == {}
        assert second.ask_and_run("b", salt="b") == {"store": 20}


def test_a_prefix_is_erased_with_all_that_continues_it(server: Server) -> None:
    with worker(server) as harness:
        harness.ask_and_run("first")
        harness.ask_and_run("branch", [*PROMPT[:14], *prompt_of(8, salt=9)])
        harness.ask_and_run("other", prompt_of(22, salt=50))
        key = harness.cache.keys_for(PROMPT)[2]
        assert harness.tiers is not None
        assert harness.tiers.forget(key) >= 3
        harness.cache.reset()
        assert harness.ask_and_run("again") == {"store": 8}
        assert harness.ask_and_run("other again", prompt_of(22, salt=50)) == {"store": 20}


def test_everything_of_this_model_is_erased_and_nothing_else(server: Server) -> None:
    with worker(server) as harness, worker(server, OTHER_MODEL) as foreign:
        harness.ask_and_run("first")
        foreign.ask_and_run("first")
        server.command("SET", "pw:{index}", "stays")
        server.command("SET", name_of(harness, 0), b"rubbish")
        assert harness.tiers is not None
        assert harness.tiers.clear() >= 5
        assert {name[: len(b"pwkv:{6d")] for name in values(server)} == {b"pwkv:{6f"}
        assert server.command("GET", "pw:{index}") == b"stays"


def test_an_erasure_waits_for_what_is_being_written(server: Server) -> None:
    """Else it would come after it."""
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "put"))
        return gates[0]

    with worker(server, wrap=wrap) as harness, ThreadPoolExecutor(1) as operator:
        harness.ask("first", PROMPT, max_tokens=1)
        harness.run()
        assert gates[0].arrived.wait(WAIT)
        harness.cache.reset()
        assert harness.tiers is not None
        cleared = operator.submit(harness.tiers.clear)
        with pytest.raises(TimeoutError):
            cleared.result(0.3)
        gates[0].may_go_on.set()
        assert cleared.result(WAIT) >= 1
        assert harness.tier.quiesce(WAIT)
        assert values(server) == []


def test_an_erasure_that_may_not_have_happened_is_an_error() -> None:
    with Server() as server, worker(server) as harness:
        harness.ask_and_run("first")
        server.kill()
        assert harness.tiers is not None
        with pytest.raises(StoreError, match="the store at redis://"):
            harness.tiers.clear()
        server.restart()
        assert harness.tiers.clear() == 0


def test_a_store_that_is_slow_is_not_written_more_than_it_takes(server: Server) -> None:
    gates: list[Gate] = []

    def wrap(store: BlockStore) -> BlockStore:
        gates.append(Gate(store, "put"))
        return gates[0]

    with worker(server, wrap=wrap) as harness:
        harness.ask("first", PROMPT, max_tokens=1)
        harness.run()
        assert gates[0].arrived.wait(WAIT)
        for _ in range(MAX_PENDING + 10):
            harness.tier.note(b"k" * 32)
        assert harness.tier.counts()[1]["lost"] >= 10
        gates[0].may_go_on.set()
        assert harness.tier.quiesce(WAIT)


def test_a_renewal_that_was_dropped_is_no_loss_and_is_tried_again() -> None:
    """It is there, and may be said again at once when the store is back."""
    with Server() as server, worker(server) as harness:
        harness.ask_and_run("first")
        keys = harness.cache.keys_for(PROMPT)[:5]
        num_lost = harness.tier.counts()[1]["lost"]
        server.kill()
        for _ in range(2):  # fails, then is not even taken
            harness.tier.note_use(keys)
            assert harness.tier.quiesce(WAIT)
        assert harness.tier.counts()[1]["failed"] >= 1
        assert harness.tier.counts()[1]["lost"] == num_lost
        server.restart()
        until = time.monotonic() + WAIT
        while len(values(server)) < 5:
            assert time.monotonic() < until, "it is never renewed"
            harness.tier.note_use(keys)
            time.sleep(0.05)


def test_what_has_lost_its_beginning_goes_with_a_prefix() -> None:
    """Nobody can tell whether block 4 continues the block that is erased: block 3 is gone."""
    chain = [bytes([number]) * 32 for number in range(6)]
    parents = {key: chain[number - 1] if number else None for number, key in enumerate(chain)}
    del parents[chain[3]]
    parents[b"o" * 32] = None
    assert keys_after(chain[1], parents) == [chain[1], chain[4], chain[2], chain[5]]
    assert keys_after(chain[5], parents) == [chain[5], chain[4]]


def test_an_erasure_holds_a_page_at_a_time(server: Server) -> None:
    """What is found is deleted before the next is looked for, except for a prefix."""
    calls: list[str] = []

    class Watched(Gate):
        async def heads(self, cursor: int, num_bytes: int) -> Heads:
            calls.append("heads")
            return await super().heads(cursor, num_bytes)

        async def delete(self, keys: Sequence[bytes]) -> None:
            assert len(keys) <= 256
            calls.append("delete")
            await super().delete(keys)

    with worker(server, wrap=lambda store: Watched(store, "")) as harness:
        harness.ask_and_run("first")
        value = server.command("GET", name_of(harness, 0))
        assert isinstance(value, bytes)
        prefix = name_of(harness, 0)[:-32]
        with redis.Redis(port=server.port, protocol=2) as client:
            client.mset({prefix + number.to_bytes(32, "big"): value for number in range(3000)})
        assert harness.tiers is not None
        assert harness.tiers.clear(Owned.by_tenant("nobody")) == 3000, "they are not what their names say"
        assert calls.index("delete") < max(i for i, call in enumerate(calls) if call == "heads")
        assert harness.tiers.clear() >= 5
        assert values(server) == []

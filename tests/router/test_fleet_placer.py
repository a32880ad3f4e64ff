"""Placing on a fleet: hits from the index, the router's own assumptions, incarnations, and the errors it raises."""

from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from kvstore.hashing import block_keys
from kvstore.redis_keys import index_keys
from kvstore.registry import WorkerRecord
from kvstore.routed_stream import Routed
from pagewire.worker_view import AdapterLabel, AdapterView, LoadSnapshot
from router.fleet import Fleet
from router.fleet_placer import FleetPlacer
from router.placement import Demand, Limits, NoWorker
from router.prompt_keys import PromptKeys
from tests.kvstore.simulated import until
from tests.router.tiered_index import TieredIndex
from tests.router.watched_worker import WatchedWorker

pytestmark = pytest.mark.timeout(180)
ROOT = b"r" * 32
PROMPT = tuple(range(100, 141))


class World:
    """2 prefill and 2 decode workers, a fleet, an index, a placer on a virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.index = TieredIndex()
        self.workers = {
            "p0": WatchedWorker("p0", "prefill"),
            "p1": WatchedWorker("p1", "prefill"),
            "d0": WatchedWorker("d0"),
            "d1": WatchedWorker("d1"),
        }

    async def start(self) -> None:
        for worker in self.workers.values():
            await worker.start()
        self.fleet = Fleet([worker.address for worker in self.workers.values()], self.index, silence_seconds=1)
        self.placer = self.new_placer()
        self.fleet.on_new_incarnation = self.placer.worker_restarted
        await self.fleet.start()
        await until(lambda: len(self.fleet.workers()) == 4)

    def new_placer(self, **options: object) -> FleetPlacer:
        return FleetPlacer(
            self.fleet, self.index, model="tiny", rng=Random(0), clock=lambda: self.now, **options  # type: ignore[arg-type]
        )  # fmt: skip

    def hold(self, worker_id: str, num_blocks: int, *, salt: str = "", incarnation: int | None = None) -> None:
        description = self.workers[worker_id].description
        keys = block_keys(ROOT, PROMPT, 4, cache_salt=salt)[:num_blocks]
        incarnation = description.incarnation if incarnation is None else incarnation
        record = WorkerRecord(worker_id, description.endpoint, description.role, incarnation)
        self.index.register(record, index_keys(keys))

    def place(self, salt: str = "", placer: FleetPlacer | None = None, **options: object) -> tuple[str | None, str]:
        demand = Demand(PROMPT, salt, 16, 1)
        placement = (placer or self.placer).place(demand, **options)  # type: ignore[arg-type]
        return None if placement.prefill is None else placement.prefill.worker_id, placement.decode.worker_id


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.fleet.stop()
    for worker in world.workers.values():
        await worker.stop()


async def test_the_deepest_prefix_wins(world: World) -> None:
    for p, d in (("p1", "d0"), ("p0", "d1")):
        world.hold(p, 10)
        world.hold(d, 10)
        assert world.place() == (p, d)
        world.index.unregister(p)
        world.index.unregister(d)
        world.now += 10  # what was assumed is forgotten


async def test_what_nobody_fetches_is_no_reason_to_spread(world: World) -> None:
    """With --kv-fetch off another worker's blocks are worth nothing here: a queue must be longer to be avoided."""
    world.hold("p1", 10)
    for may_fetch, depth in ((True, 10), (False, 0)):
        placer = world.new_placer(may_fetch=may_fetch)
        assert world.place(placer=placer)[0] == "p1"
        assert placer.last_plan is not None
        assert placer.last_plan.prefill is not None
        (other,) = (score for score in placer.last_plan.prefill.scores if score.worker_id == "p0")
        assert other.cost == pytest.approx(len(PROMPT) - 0.9 * 4 * depth)


async def test_a_tier_is_worth_less_than_the_device_and_more_than_nothing(world: World) -> None:
    for worker_id in ("p0", "p1", "d0", "d1"):
        world.hold(worker_id, 0)
    world.index.lower = {"host": {"p1": 10, "d0": 10}}
    assert world.place() == ("p1", "d0")
    plan = world.placer.last_plan
    assert plan is not None
    assert plan.prefill is not None
    assert plan.prefill.num_hit_blocks == 10
    assert plan.prefill.candidate.num_lower_blocks == {"host": 10}
    assert plan.prefill.scores[0].parts["tiers"] == pytest.approx(0.1 * 40)
    world.now += 10
    world.index.lower |= {"disk": {"p0": 10, "d1": 10}}
    assert world.place() == ("p1", "d0"), "host memory is nearer than a disk"
    world.now += 10
    world.hold("p0", 10)
    world.hold("d1", 10)
    assert world.place() == ("p0", "d1"), "and the device nearest"


async def test_c10_another_salt_is_another_prompt(world: World) -> None:
    world.hold("p1", 10, salt="a")
    world.place("a")
    assert world.placer.last_plan is not None
    assert world.placer.last_plan.prefill is not None
    assert world.placer.last_plan.prefill.num_hit_blocks == 10
    world.now += 10
    world.place("b")
    assert world.placer.last_plan.prefill.num_hit_blocks == 0


async def test_blocks_of_another_incarnation_do_not_count(world: World) -> None:
    """C1: the index may still have what the process before said."""
    world.hold("p1", 10, incarnation=1)
    placer = world.new_placer()
    for _ in range(2):
        placer.place(Demand(PROMPT, "", 16, 1))
        assert placer.last_plan is not None
        assert placer.last_plan.prefill is not None
        assert placer.last_plan.prefill.num_hit_blocks == 0
        world.now += 10


async def test_a_burst_goes_where_its_prefix_is_about_to_be_and_spreads_otherwise(world: World) -> None:
    """No load message and no event arrives in between: the clock stands still."""
    world.hold("p1", 5)
    assert [world.place()[0] for _ in range(2)] == ["p1", "p1"]  # 21 tokens queued and 1 to compute, or 41
    decodes = {world.place(str(salt))[1] for salt in range(2)}
    assert decodes == {"d0", "d1"}
    world.now += 10
    prefills = {world.place(str(salt))[0] for salt in range(2, 4)}
    assert prefills == {"p0", "p1"}


async def test_several_choices_of_a_prompt_are_prefilled_once(world: World) -> None:
    told: list[Routed] = []
    world.placer.on_routed = told.append
    world.placer.place(Demand(PROMPT, "", 16, num_choices=8))
    assert [(each.worker_id[0], each.num_sequences) for each in told] == [("p", 1), ("d", 8)]


async def test_what_was_assumed_of_a_process_dies_with_it(world: World) -> None:
    first, _ = world.place()
    assert first is not None
    await world.workers[first].restart()
    incarnation = world.workers[first].description.incarnation
    await until(lambda: world.fleet.find(first, incarnation) is not None and world.fleet.workers()[first].alive)
    world.place(avoid={(worker_id, worker.description.incarnation) for worker_id, worker in world.workers.items()
                       if worker_id.startswith("p") and worker_id != first})  # fmt: skip
    assert world.placer.last_plan is not None
    prefill = world.placer.last_plan.prefill
    assert prefill is not None
    assert (prefill.candidate.worker_id, prefill.num_hit_blocks) == (first, 0)


async def test_what_was_assumed_of_a_worker_that_is_gone_is_forgotten(world: World) -> None:
    world.place()
    assert world.placer._assumptions._index.workers()
    world.placer.keep_only([])
    assert not world.placer._assumptions._index.workers()


async def test_round_robin_takes_turns(world: World) -> None:
    placer = world.new_placer(policy="round_robin")
    placed = [world.place(placer=placer) for _ in range(4)]
    assert {placed[0], placed[1]} in ({("p0", "d0"), ("p1", "d1")}, {("p0", "d1"), ("p1", "d0")})
    assert placed[2:] == placed[:2]


async def test_conditional_disaggregation(world: World) -> None:
    world.hold("d1", 9)  # 36 of 41 tokens
    assert world.place(placer=world.new_placer(local_prefill_max_tokens=5)) == (None, "d1")
    prefill, decode = world.place(placer=world.new_placer(local_prefill_max_tokens=4))
    assert prefill is not None
    assert decode == "d1"


async def test_limits_and_the_lack_of_workers(world: World) -> None:
    assert world.placer.limits() == Limits(256, 256, 4)
    everybody = {(name, worker.description.incarnation) for name, worker in world.workers.items()}
    with pytest.raises(NoWorker, match="d0 avoided, d1 avoided") as caught:
        world.place(avoid=everybody)
    assert caught.value.avoided
    placement = world.placer.place(Demand(PROMPT, "", 16, 1))
    assert world.placer.is_alive(placement.decode)
    assert world.placer.channel(placement.decode) is world.fleet.workers()[placement.decode.worker_id].channel
    for name in ("d0", "d1"):
        world.workers[name].say(LoadSnapshot(draining=True))
    await until(lambda: world.placer.limits() is None)
    with pytest.raises(NoWorker, match="d0 draining, d1 draining") as caught:
        world.place()
    assert not caught.value.avoided
    await world.workers[placement.decode.worker_id].stop()
    await until(lambda: not world.placer.is_alive(placement.decode))


async def test_workers_of_another_model_are_not_used(world: World) -> None:
    placer = FleetPlacer(world.fleet, world.index, model="other")
    assert placer.limits() is None
    with pytest.raises(NoWorker, match="d0 other model, d1 other model"):
        world.place(placer=placer)


async def test_a_prompt_is_hashed_once_and_its_output_continues_the_chain(world: World) -> None:
    keys = PromptKeys(PROMPT, "salt")
    spaces = world.placer.key_spaces()
    assert spaces == [(ROOT, 4)]
    assert keys.num_unprepared_tokens(spaces) == 41
    keys.prepare(spaces)
    assert keys.num_unprepared_tokens(spaces) == 0
    output = tuple(range(7))
    for some in ((), output[:2], output[:3], output):
        assert keys.of(spaces[0], some) == index_keys(block_keys(ROOT, (*PROMPT, *some), 4, cache_salt="salt"))
    assert PromptKeys((1, 2)).of(spaces[0], (3, 4)) == index_keys(block_keys(ROOT, (1, 2, 3, 4), 4))
    assert world.new_placer(policy="load").key_spaces() == spaces, "for the hint who holds the prefix"
    assert FleetPlacer(world.fleet, None, model="tiny", policy="load").key_spaces() == []


async def test_the_hint_says_who_holds_the_prefix_whatever_the_policy(world: World) -> None:
    world.hold("d1", 8)
    world.hold("p0", 3)
    for policy in ("prefix", "load", "round_robin", "random"):
        placement = world.new_placer(policy=policy).place(Demand(PROMPT, "", 4, 1))
        assert [(each.worker_id, each.num_blocks) for each in placement.prefix_sources] == [("d1", 8), ("p0", 3)]
    world.index.lower = {"host": {"p0": 9}}
    for policy in ("prefix", "load"):
        placement = world.new_placer(policy=policy).place(Demand(PROMPT, "", 4, 1))
        found = [(each.worker_id, each.num_blocks, each.num_lower_blocks) for each in placement.prefix_sources]
        assert found == [("p0", 9, 6), ("d1", 8, 0)]


@pytest.mark.parametrize("policy", ["load", "round_robin", "random", "prefix"])
async def test_what_is_counted_does_not_depend_on_the_policy(world: World, policy: str) -> None:
    """Who does not look at caches recomputes what others have: that is what the metrics are to show."""
    world.hold("p0", 5)
    world.hold("p1", 8)
    placement = world.new_placer(policy=policy).place(Demand(PROMPT, "", 4, 1))
    assert placement.prefill is not None
    depth = {"p0": 5, "p1": 8}[placement.prefill.worker_id]
    assert (placement.num_device_tokens, placement.num_best_tokens) == (4 * depth, 32)


async def test_an_explanation_is_what_would_happen_and_changes_nothing(world: World) -> None:
    world.hold("p1", 6)
    world.hold("d1", 2)
    world.workers["p0"].say(LoadSnapshot(draining=True))
    await until(lambda: world.fleet.workers()["p0"].load.draining)
    placer = world.new_placer(temperature=1.0)
    demand = Demand(PROMPT, "", 16, 1)
    for _ in range(20):
        first, again = placer.explain(demand), placer.explain(demand)
        assert first == again
        placement = placer.place(demand)
        assert placement.prefill is not None
        assert (first.prefill_worker, first.decode_worker) == (placement.prefill.worker_id, placement.decode.worker_id)
        assert first.reason == "disaggregated"
        world.now += 10
    verdicts = {each.worker_id: each for each in first.verdicts}
    assert [each.role for each in first.verdicts] == ["prefill", "prefill", "decode", "decode"]
    assert verdicts["p0"].obstacle == "draining"
    assert (verdicts["p1"].num_indexed_blocks, verdicts["p1"].parts) == (6, {"uncached": 17.0, "queued": 0.0})
    assert verdicts["p1"].cost == 17
    assert verdicts["d1"].num_indexed_blocks == 2
    for name in ("d0", "d1"):
        await world.workers[name].stop()
    await until(lambda: world.placer.limits() is None)
    lost = placer.explain(demand)
    assert (lost.prefill_worker, lost.decode_worker) == ("", "")
    assert lost.reason == "no decode worker can take the request: d0 unreachable, d1 unreachable"
    obstacles = {each.worker_id: each.obstacle for each in lost.verdicts}
    assert obstacles == {"p0": "draining", "p1": "no decode worker", "d0": "unreachable", "d1": "unreachable"}


async def test_a_placement_says_what_it_counted_on(world: World) -> None:
    world.hold("p1", 10)
    world.hold("d0", 3)
    first = world.placer.place(Demand(PROMPT, "", 16, 1))
    assert (first.num_hit_tokens, first.num_assumed_tokens, first.num_best_tokens) == (40, 40, 40)
    world.index.unregister("p1")
    second = world.placer.place(Demand(PROMPT[:40], "", 16, 1))  # a hit leaves one token
    assert second.prefill is not None
    assert second.prefill.worker_id == "p1"
    assert (second.num_hit_tokens, second.num_assumed_tokens, second.num_best_tokens) == (0, 39, 12)
    assert (first.num_expected_tokens, second.num_expected_tokens) == (40, 39)


async def test_what_can_be_fetched_is_expected_too_and_no_load(world: World) -> None:
    world.hold("d0", 7)
    placer = world.new_placer(may_fetch=True)
    assert [placer.place(Demand(PROMPT, "", 16, 1)).num_expected_tokens for _ in range(2)] == [28, 40]
    (load,) = {each.num_tokens for each in placer._assumptions.loads(world.now).values()} - {0}
    assert load in (13, 14)


async def test_every_decision_is_one_line_with_who_why_and_the_costs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.hold("p1", 10)
    with caplog.at_level("INFO", "router.fleet_placer"):
        world.placer.place(Demand(PROMPT, "", 16, 1, request_id="r1"))
    (record,) = caplog.records
    said = vars(record)
    assert (said["request_id"], said["policy"], said["reason"], said["prefill"]) == (
        "r1",
        "prefix",
        "disaggregated",
        "p1",
    )
    assert said["prefill_costs"] == "p1=1 p0=5"
    assert (said["prompt_tokens"], said["hit_tokens"]) == (41, 40)


async def test_routers_that_hear_of_each_other_stick_together_and_spread(world: World) -> None:
    """Two routers, one burst, no load message in between: equal prompts meet on one worker, others spread evenly."""
    routers = [world.placer, world.new_placer()]
    routers[0].on_routed, routers[1].on_routed = routers[1].note_routed_elsewhere, routers[0].note_routed_elsewhere
    first = [world.place("same", routers[number % 2])[0] for number in range(2)]
    assert len(set(first)) == 1
    world.now += 10
    spread = Counter(world.place(str(number), routers[number % 2])[0] for number in range(20))
    assert spread == {"p0": 10, "p1": 10}
    gone = Routed("p0", 12345, num_tokens=10**6)  # of a process that is not there any more
    routers[0].note_routed_elsewhere(gone)
    world.now += 10
    assert {world.place(f"later {number}")[0] for number in range(2)} == {"p0", "p1"}


async def test_an_adapters_requests_go_where_it_is_and_stay_where_it_is_at_hand(world: World) -> None:
    old, label = AdapterLabel("style", b"d" * 32, 3), AdapterLabel("style", b"d" * 32, 4)

    def say(worker_id: str, found: AdapterLabel, *, resident: bool) -> None:
        adapters = (AdapterView(found, 8, "/a", 1, resident),)
        world.workers[worker_id].say(LoadSnapshot(num_free_blocks=64, adapters=adapters))

    def place() -> tuple[str | None, str]:
        placement = world.placer.place(Demand(PROMPT, "", 16, 1, adapter=label))
        return None if placement.prefill is None else placement.prefill.worker_id, placement.decode.worker_id

    def seen(worker_id: str) -> tuple[AdapterView, ...]:
        return world.fleet.workers()[worker_id].load.adapters

    assert world.placer.adapters() == {}
    with pytest.raises(NoWorker, match="d0 lacks the adapter, d1 lacks the adapter"):
        place()
    say("p0", label, resident=False)
    say("d0", old, resident=True)
    await until(lambda: seen("p0") and seen("d0"))
    assert world.placer.adapters() == {"style": old}, "what only a prefill worker has is of no use"
    say("d1", label, resident=False)
    await until(lambda: seen("d1"))
    assert world.placer.adapters() == {"style": label}
    assert place() == ("p0", "d1"), "d0 has another load, p1 has none"
    say("d0", label, resident=True)
    say("p0", old, resident=False)
    await until(lambda: seen("d0")[0].resident and seen("p0")[0].label == old and seen("d0")[0].label == label)
    world.now += 10
    assert [place() for _ in range(3)] == [(None, "d0")] * 3, "nobody who prefills has it: decode does"


async def test_a_retired_load_is_for_requests_that_began_with_it_only(world: World) -> None:
    """And without a worker that serves, the names are those that the last ones had: such requests wait like others."""
    old, label = AdapterLabel("style", b"d" * 32, 3), AdapterLabel("style", b"d" * 32, 4)
    gone = AdapterLabel("gone", b"e" * 32, 9)
    views = tuple(AdapterView(each, 8, "/a", 1, True, each != label) for each in (label, old, gone))
    for worker_id in ("p0", "d0"):
        world.workers[worker_id].say(LoadSnapshot(num_free_blocks=64, adapters=views))
    await until(lambda: all(world.fleet.workers()[each].load.adapters == views for each in ("p0", "d0")))
    adapters = world.placer.adapters()
    assert adapters == {"style": label}
    assert world.placer.adapters() is adapters, "made anew for a request"
    for each in (old, gone, label):
        placement = world.placer.place(Demand(PROMPT, "", 16, 1, adapter=each))
        assert (placement.prefill and placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d0")
    for worker_id in ("d0", "d1"):
        world.workers[worker_id].say(LoadSnapshot(draining=True, adapters=views))
    await until(lambda: world.placer.limits() is None)
    assert world.placer.adapters() == {"style": label}
    with pytest.raises(NoWorker, match="d0 draining"):
        world.placer.place(Demand(PROMPT, "", 16, 1, adapter=label))

"""The policy alone: exact scores, exact choices, each reason for not choosing somebody."""

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from pagewire.worker_view import LoadSnapshot, WorkerDescription, WorkerFingerprint, WorkerRole
from router.cost import Candidate, RequestSize, Weights
from router.policy import NoDecodeWorker, Plan, Policy, choose, obstacle, plan

FINGERPRINT = WorkerFingerprint(b"r" * 32, "bm", "float32/reference/avx2/tp1", 4, (1024,))
SIZE = RequestSize(num_prompt_tokens=41)


def worker(
    worker_id: str,
    role: WorkerRole = "prefill",
    *,
    hit: int = 0,
    load: LoadSnapshot | None = None,
    fingerprint: WorkerFingerprint = FINGERPRINT,
    max_model_len: int = 256,
    num_blocks: int = 64,
    alive: bool = True,
    serves_model: bool = True,
    last_chosen: int = 0,
) -> Candidate:
    description = WorkerDescription(
        worker_id=worker_id,
        incarnation=7,
        role=role,
        endpoint=f"{worker_id}:1",
        model="tiny",
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        vocab_size=256,
    )
    load = load or LoadSnapshot(num_free_blocks=num_blocks)
    return Candidate(description, load, alive, serves_model, hit, last_chosen)


def chosen(candidates: list[Candidate], policy: Policy = "prefix", seed: int = 0) -> str | None:
    choice = choose(candidates, SIZE, policy=policy, rng=Random(seed))
    return None if choice is None else choice.candidate.worker_id


def test_prefill_costs_what_must_be_computed_before_the_first_token() -> None:
    busy = LoadSnapshot(num_queued_tokens=30, num_free_blocks=64)
    choice = choose([worker("a"), worker("b", hit=5), worker("c", hit=9, load=busy)], SIZE, rng=Random(0))
    assert choice is not None
    assert [(each.worker_id, each.cost, dict(each.parts)) for each in choice.scores] == [
        ("b", 21, {"uncached": 21, "queued": 0}),
        ("c", 27.5, {"uncached": 5, "queued": 22.5}),
        ("a", 41, {"uncached": 41, "queued": 0}),
    ]
    assert choice.num_hit_blocks == 5


def test_what_is_computed_where_others_wait_delays_them() -> None:
    """Every worker has a long queue. Computing the prompt where fewer wait would be sooner for itself, but all who come
    after pay for it; where nobody waits, nobody does."""

    def queue(num_waiting: int, num_tokens: int) -> LoadSnapshot:
        return LoadSnapshot(num_waiting=num_waiting, num_queued_tokens=num_tokens, num_free_blocks=64)

    holder = worker("holder", hit=9, load=queue(30, 100))
    busy, idle = worker("busy", load=queue(20, 40)), worker("idle", hit=1)
    choice = choose([holder, busy], SIZE, rng=Random(0))
    assert choice is not None
    assert [(each.worker_id, dict(each.parts)) for each in choice.scores] == [
        ("holder", {"uncached": 5, "queued": 75, "delays": 15}),
        ("busy", {"uncached": 41, "queued": 30, "delays": 82}),
    ]
    assert chosen([holder, busy, idle]) == "idle"
    assert chosen([holder, busy], "load") == "busy"


def test_what_can_be_fetched_delays_nobody() -> None:
    load = LoadSnapshot(num_waiting=10, num_free_blocks=64)
    choice = choose([replace(worker("a", load=load), num_fetchable_blocks=10)], SIZE, rng=Random(0))
    assert choice is not None
    assert choice.scores[0].parts["delays"] == 1


def test_decode_workers_delay_others_only_by_what_they_compute_themselves() -> None:
    load = LoadSnapshot(num_waiting=10, num_free_blocks=64)
    for received, expected in ((0.25, None), (1.0, 41.0)):
        choice = choose(
            [worker("d", "decode", load=load)], SIZE, rng=Random(0), weights=Weights(received_token=received)
        )
        assert choice is not None
        assert choice.scores[0].parts.get("delays") == expected


def test_what_can_be_fetched_costs_less_than_what_must_be_computed() -> None:
    """41 tokens; somebody holds 8 blocks of 4: one who holds 3 fetches 20 tokens and computes 9."""
    some = replace(worker("some", hit=3), num_fetchable_blocks=8)
    none = replace(worker("none"), num_fetchable_blocks=8)
    all_ = replace(worker("all", hit=8), num_fetchable_blocks=8)
    choice = choose([some, none, all_, worker("alone")], SIZE, rng=Random(0))
    assert choice is not None
    costs = {each.worker_id: each.cost for each in choice.scores}
    assert costs == {"all": 9, "some": 9 + 0.1 * 20, "none": pytest.approx(9 + 0.1 * 32), "alone": 41}


def test_what_another_has_below_its_device_costs_the_load_too() -> None:
    """41 tokens; others hold 3 blocks of 4 on a device, and 3 more in host memory: those cost twice as much."""
    one = replace(worker("one", hit=1), num_fetchable_blocks=3, num_fetchable_lower={"host": 3})
    most = replace(worker("most", hit=6), num_fetchable_blocks=3, num_fetchable_lower={"host": 3, "disk": 40})
    choice = choose([one, most], SIZE, rng=Random(0))
    assert choice is not None
    costs = {each.worker_id: each.cost for each in choice.scores}
    assert costs["one"] == pytest.approx(17 + 0.1 * 8 + 0.2 * 12)
    assert costs["most"] == pytest.approx(1 + 0.35 * 16)


def test_a_decode_worker_fetches_only_if_nobody_prefills_for_it() -> None:
    both = [replace(worker(name, "decode", hit=hit), num_fetchable_blocks=8) for name, hit in (("a", 0), ("b", 8))]
    for received, expected in ((0.25, 0.25 * 41), (1.0, 9 + 0.1 * 32)):
        choice = choose(both, SIZE, rng=Random(0), weights=Weights(received_token=received))
        assert choice is not None
        costs = {each.worker_id: each.parts["uncached"] for each in choice.scores}
        assert costs["a"] == pytest.approx(expected)
        assert costs["b"] == received * 9


def test_a_full_hit_leaves_one_token() -> None:
    """The last prompt token must be computed: 40 tokens, all 10 blocks cached."""
    choice = choose([worker("a", hit=10)], RequestSize(40), rng=Random(0))
    assert choice is not None
    assert choice.scores[0].parts["uncached"] == 1


def test_decode_costs_blocks_and_sequences_beside_the_tokens_to_receive() -> None:
    load = LoadSnapshot(
        num_running=2, num_waiting=1, num_transfers=1, num_queued_tokens=10, num_free_blocks=3, num_held_blocks=0
    )
    weights = Weights(active_block=2, sequence=5, received_token=0.5, missing_block=100)
    choice = choose([worker("d", "decode", hit=5, load=load)], SIZE, rng=Random(0), weights=weights)
    assert choice is not None
    # 21 tokens and a first output: 6 blocks, of which 3 are free; 61 of 64 are in use.
    expected = {"uncached": 10.5, "queued": 10, "active": 122, "sequences": 20, "missing": 300}
    assert choice.scores[0].parts == expected
    assert choice.scores[0].cost == sum(expected.values())


def test_load_policy_ignores_hits() -> None:
    busy = LoadSnapshot(num_queued_tokens=1, num_free_blocks=64)
    candidates = [worker("deep", hit=10, load=busy), worker("idle")]
    assert chosen(candidates, "prefix") == "deep"
    assert chosen(candidates, "load") == "idle"


def test_equals_go_to_the_one_chosen_longest_ago_then_at_random() -> None:
    assert chosen([worker("a", last_chosen=3), worker("b", last_chosen=2), worker("c", last_chosen=5)]) == "b"
    fresh = [worker(name) for name in "abcd"]
    counts = Counter(chosen(fresh, seed=seed) for seed in range(200))
    assert set(counts) == set("abcd")
    assert chosen(fresh, seed=3) == chosen(fresh, seed=3)


def test_round_robin_and_random_ignore_everything_else() -> None:
    busy = LoadSnapshot(num_queued_tokens=1000)
    assert chosen([worker("a", hit=10, last_chosen=4), worker("b", load=busy, last_chosen=1)], "round_robin") == "b"
    counts = Counter(chosen([worker("a", hit=10), worker("b", load=busy)], "random", seed) for seed in range(200))
    assert 60 < counts["a"] < 140


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (worker("w"), ""),
        (worker("w", alive=False), "unreachable"),
        (worker("w", serves_model=False), "other model"),
        (worker("w", load=LoadSnapshot(draining=True, num_free_blocks=64)), "draining"),
        (worker("w", num_blocks=10), "too small"),
        (worker("w", num_blocks=11), ""),
        (worker("w", max_model_len=40), "too small"),
        (worker("w", max_model_len=41), ""),
        (worker("w", "decode", max_model_len=41), "too small"),
        (worker("w", "decode", max_model_len=42), ""),
    ],
)
def test_who_cannot_take_it(candidate: Candidate, reason: str) -> None:
    assert obstacle(candidate, SIZE) == reason
    assert obstacle(candidate, SIZE, {("w", 7)}) == (reason or "avoided")
    assert obstacle(candidate, SIZE, {("w", 8)}) == reason  # another process was to be avoided
    assert (choose([candidate], SIZE, rng=Random(0)) is None) == bool(reason)


def test_b7_a_dead_worker_is_not_chosen_for_its_cache() -> None:
    assert chosen([worker("dead", hit=10, alive=False), worker("alive")]) == "alive"


def planned(candidates: list[Candidate], **options: object) -> tuple[str | None, str, str]:
    result = plan(candidates, SIZE, rng=Random(0), **options)  # type: ignore[arg-type]
    assert isinstance(result, Plan)
    prefill = None if result.prefill is None else result.prefill.candidate.worker_id
    return prefill, result.decode.candidate.worker_id, result.reason


def test_plan_disaggregates_unless_there_is_a_reason_not_to() -> None:
    p, d = worker("p"), worker("d", "decode", hit=8)
    assert planned([p, d]) == ("p", "d", "disaggregated")
    assert planned([p, d], local_prefill_max_tokens=8) == ("p", "d", "disaggregated")
    assert planned([p, d], local_prefill_max_tokens=9) == (None, "d", "short")
    assert planned([p, d], wants_prefill=False) == (None, "d", "outputs_exist")
    assert planned([p, d], avoid={("p", 7)}) == (None, "d", "no_prefill_worker")
    assert planned([worker("p", alive=False), d]) == (None, "d", "no_prefill_worker")
    assert planned([worker("p", max_model_len=30), d]) == (None, "d", "no_prefill_worker")


def test_plan_pairs_only_what_fits_together() -> None:
    other = WorkerFingerprint(b"r" * 32, "canonical", FINGERPRINT.numerics_class, 4, (1024,))
    candidates = [worker("deep", hit=10, fingerprint=other), worker("fits"), worker("d", "decode")]
    assert planned(candidates) == ("fits", "d", "disaggregated")
    assert planned(candidates[:1] + candidates[2:]) == (None, "d", "no_prefill_worker")


def test_plan_pairs_workers_of_different_numbers_of_ranks() -> None:
    sizes = [replace(FINGERPRINT, numerics_class=f"float32/reference/avx2/tp{size}") for size in (1, 2, 16)]
    for p, d in product(sizes, sizes):
        candidates = [worker("p", fingerprint=p), worker("d", "decode", fingerprint=d)]
        assert planned(candidates) == ("p", "d", "disaggregated")
    for other in ("float32/reference/avx2/tp2/x", "bfloat16/reference/avx2/tp2", "float32/native/avx2/tp2"):
        candidates = [worker("p", fingerprint=replace(sizes[0], numerics_class=other)), worker("d", "decode")]
        assert planned(candidates) == (None, "d", "no_prefill_worker")
    assert not sizes[0].fits(replace(sizes[1], root=b"x" * 32))


def test_plan_prefers_the_numerics_class_of_a_migrated_request() -> None:
    other = WorkerFingerprint(b"r" * 32, "bm", "bfloat16/torch/amx/tp1", 4, (1024,))
    same, different = worker("same", "decode", load=LoadSnapshot()), worker("different", "decode", fingerprint=other)
    wanted = {"numerics_class": FINGERPRINT.numerics_class, "wants_prefill": False}
    assert planned([same, different], wants_prefill=False)[1] == "different"
    assert planned([same, different], **wanted)[1] == "same"
    assert planned([different], **wanted)[1] == "different"
    assert planned([same, different], avoid={("same", 7)}, **wanted)[1] == "different"


def test_without_a_prefill_worker_a_decode_workers_hit_counts_in_full() -> None:
    busy = LoadSnapshot(num_running=1, num_free_blocks=64)
    p, hit, idle = worker("p"), worker("hit", "decode", hit=10, load=busy), worker("idle", "decode")
    assert planned([p, hit, idle])[1] == "idle"  # 1/4 of 40 tokens against one sequence
    assert planned([hit, idle])[1] == "hit"
    assert planned([p, hit, idle], wants_prefill=False)[1] == "hit"


def test_no_decode_worker_says_why() -> None:
    assert plan([worker("p")], SIZE, rng=Random(0)) == NoDecodeWorker("no decode worker is known", avoided=False)
    candidates = [worker("a", "decode", alive=False), worker("b", "decode")]
    found = plan(candidates, SIZE, rng=Random(0), avoid={("b", 7)})
    message = "no decode worker can take the request: a unreachable, b avoided"
    assert found == NoDecodeWorker(message, avoided=True)


def test_lower_tiers_cost_a_part_of_computing() -> None:
    """4 blocks of 4 tokens on the host's memory: cheaper than computing them, dearer than the device."""
    base = worker("host", hit=5)
    host = replace(base, num_lower_blocks={"host": 4})
    candidates = [host, worker("device", hit=5), worker("nothing")]
    choice = choose(candidates, SIZE, rng=Random(0))
    assert choice is not None
    assert [(each.worker_id, round(each.cost, 6)) for each in choice.scores] == [
        ("device", 21),
        ("host", 22.6),
        ("nothing", 41),
    ]
    free = choose(candidates, SIZE, rng=Random(0), weights=Weights(tier_token={"host": 0.0}))
    assert free is not None
    assert free.scores[0].cost == free.scores[1].cost == 21


# --- sessions ---

SESSIONS = [f"session-{number}" for number in range(300)]


def stuck_to(candidates: list[Candidate], session_id: str) -> str:
    choice = choose(candidates, SIZE, policy="session", session_id=session_id, rng=Random())
    assert choice is not None
    assert choice.sticky
    return choice.candidate.worker_id


def test_a_session_has_one_worker_on_every_router_and_moves_only_with_it() -> None:
    workers = [worker(name, hit=number) for number, name in enumerate("abcd")]
    before = {each: stuck_to(workers, each) for each in SESSIONS}
    assert {each: stuck_to(workers[::-1], each) for each in SESSIONS} == before
    assert all(40 < count < 110 for count in Counter(before.values()).values())
    after = {each: stuck_to([*workers, worker("e")], each) for each in SESSIONS}
    moved = {each for each in SESSIONS if before[each] != after[each]}
    assert {after[each] for each in moved} == {"e"}
    assert 30 < len(moved) < 100
    other_model = worker("z", serves_model=False)
    assert {each: stuck_to([*workers, other_model], each) for each in SESSIONS} == before


def test_a_session_whose_worker_is_unfit_goes_by_prefix_and_comes_back() -> None:
    workers = [worker(name) for name in "abc"]
    mine = stuck_to(workers, "s")
    deepest = next(name for name in "abc" if name != mine)
    for unfit in ({"alive": False}, {"load": LoadSnapshot(draining=True, num_free_blocks=64)}, {"num_blocks": 4}):
        others = [worker(name, hit=5 if name == deepest else 0) for name in "abc" if name != mine]
        choice = choose([worker(mine, hit=9, **unfit), *others], SIZE, policy="session", session_id="s", rng=Random())
        assert choice is not None
        assert (choice.candidate.worker_id, choice.sticky) == (deepest, False)
    assert stuck_to(workers, "s") == mine
    assert chosen([worker("a"), worker("b", hit=3)], "session") == "b"  # no session id: as `prefix`


# --- temperature ---


def test_temperature_draws_by_cost() -> None:
    """Costs 21, 28.5 and 41: at temperature 1 the chances are as 1 : e^-0.375 : e^-1."""
    candidates = [worker("a", hit=5), worker("b", hit=5, load=LoadSnapshot(num_queued_tokens=10)), worker("c")]

    def counts(temperature: float) -> Counter[str]:
        rng = Random(1)
        choices = [choose(candidates, SIZE, rng=rng, temperature=temperature) for _ in range(2000)]
        return Counter(choice.candidate.worker_id for choice in choices if choice is not None)

    assert counts(0.0) == {"a": 2000}
    warm = counts(1.0)
    assert [round(warm[name] / 2000, 1) for name in "abc"] == [0.5, 0.3, 0.2]
    cool = counts(0.1)
    assert cool["a"] > 1950
    assert cool["c"] == 0
    assert min(counts(100.0).values()) > 580
    equal = [worker("a"), worker("b", last_chosen=1)]
    assert {choose(equal, SIZE, rng=Random(n), temperature=1.0).candidate.worker_id for n in range(9)} == {"a"}  # type: ignore[union-attr]


def test_a_busy_decode_worker_is_not_given_short_prefills() -> None:
    step = worker("d").description.max_num_batched_tokens
    for queued, reason in ((step, "short"), (step + 1, "disaggregated")):
        load = LoadSnapshot(num_queued_tokens=queued, num_free_blocks=64)
        found = planned([worker("p"), worker("d", "decode", hit=10, load=load)], local_prefill_max_tokens=10)
        assert found[2] == reason

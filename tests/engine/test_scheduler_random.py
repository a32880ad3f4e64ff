"""Random workloads against the oracle: whatever is batched, shared, preempted or aborted, the tokens are the same.

Hypothesis draws only a seed: workloads drawn piece by piece stay so small that blocks never run out.
"""

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft.book import DraftBook
from engine.draft.drafter import Drafter
from engine.request import AdoptedKv, ChoiceState, EngineRequest
from engine.sequence import Sequence
from engine.speculation import MADE, Allowance, Speculator
from engine.tiers.host_slots import HostSlots
from engine.tiers.tier import Bytes
from engine.transfer.checksum import checksum
from kvstore.block_pool import BlockPool
from kvstore.kv_groups import HeldBlocks, plan_groups
from kvstore.tier_block import Entry, Owned
from pagewire.sampling import SamplingParams
from pagewire.speculative import SpeculativeConfig
from tests.engine.draft.fake_model import FakeDraftModel
from tests.engine.fake_runner import EOS, GROUP_OFFSET, VOCAB_SIZE, next_token, suppressed
from tests.engine.harness import BLOCK_SIZE, Harness

PREFIX = tuple(range(11, 23))
SEEDS = st.integers(0, 2**32 - 1)


def _request(rng: Random, request_id: str) -> EngineRequest:
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3, 5]),
        max_tokens=rng.choice([1, 2, 6, 14, None]),
        min_tokens=rng.choice([0, 0, 2]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 3, 12]))),
        ignore_eos=rng.random() < 0.5,
    )
    # Common prefixes, whole blocks and not, so that the cache hits and blocks are shared; sometimes the whole prompt.
    head = PREFIX[: rng.choice([0, 4, 5, 8, 8, 12])]
    tail = tuple(rng.randrange(3, 9) for _ in range(rng.choice([0, 0, 1, 3, 9]))) or ((9,) if not head else ())
    request = EngineRequest(
        request_id,
        head + tail,
        params,
        cache_salt=rng.choice(["", "", "", "salt"]),
        prefill_only=rng.random() < 0.25,
        priority=rng.choice([0, 0, 0, 1, -1]),
        tenant=rng.choice(["", "", "a", "b"]),
    )
    return _resumed(rng, request) if params.max_tokens != 1 and rng.random() < 0.4 else request


def _resumed(rng: Random, request: EngineRequest) -> EngineRequest:
    """The same request after it has run elsewhere for a while; some choices may be finished, some not listed."""
    params, states = request.params, []
    most = min(4, (params.max_tokens or 9) - 1)
    for choice in range(params.n):
        tokens: list[int] = []
        for index in range(rng.randint(0, most)):
            suppress = suppressed(params.stop_token_ids, index, params.min_tokens)
            tokens.append(next_token([*request.prompt_token_ids, *tokens], choice, suppress))
        finished = rng.random() < 0.2
        if tokens or finished or rng.random() < 0.5:
            states.append(ChoiceState(choice, tuple(tokens), finished))
    if len(states) == params.n and all(state.finished for state in states):
        return request
    return replace(request, choices=tuple(states))


def _with_adopted(rng: Random, harness: Harness, request: EngineRequest) -> EngineRequest:
    """The request with the KV of its first tokens transferred into this pool, as decode's intake does it."""
    states = {state.choice: state for state in request.choices}
    going_on = [states.get(choice, ChoiceState(choice)) for choice in range(request.params.n)]
    going_on = [state for state in going_on if not state.finished]
    tokens = list(request.prompt_token_ids)
    if len(going_on) == 1:
        tokens += going_on[0].output_token_ids
    num_tokens = rng.choice([len(tokens), len(request.prompt_token_ids), rng.randint(0, len(tokens))])
    # The scheduler may leave the last token to be computed.
    firsts = harness.cache.groups.first_blocks(max(0, num_tokens - 1))
    is_committed, surplus = rng.random() < 0.5, rng.choice([0, 0, 1])  # intake may have committed what it verified
    keys, size = harness.cache.keys_for(tokens[:num_tokens], request.cache_salt), harness.block_size
    end = harness.cache.num_blocks_for(num_tokens) + surplus
    blocks = harness.cache.allocate(sum(end - first for first in firsts))
    if blocks is None:
        return request
    held = []
    for group, first in enumerate(firsts):
        own = [blocks.pop(0) for _ in range(end - first)]
        for position in range(first * size, num_tokens):
            block_id = own[position // size - first]
            harness.runner.slots[block_id, position % size] = tokens[position] + group * GROUP_OFFSET
        for i in range(first, len(keys)) if is_committed else ():
            parent = keys[i - 1] if i else None
            content = tokens[i * size : (i + 1) * size]
            own[i - first] = harness.cache.commit(own[i - first], keys[i], content, parent, group=group)
        held.append(HeldBlocks(first, tuple(own)))
    return replace(request, adopted=AdoptedKv(held[0].block_ids, num_tokens, held[0].first, tuple(held[1:])))


class Guesser:
    """Proposes what the oracle will say, but for a random mistake here and there, and at times beyond the end."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._mistakes = rng.choice([0.0, 0.2, 0.6, 1.0])

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        most = allowance(MADE, 0)
        tokens, params = list(sequence.token_ids), sequence.params
        for _ in range(self._rng.randint(0, most)):
            index = len(tokens) - sequence.num_prompt_tokens
            right = next_token(tokens, sequence.choice, suppressed(params.stop_token_ids, index, params.min_tokens))
            tokens.append((right + 1) % VOCAB_SIZE if self._rng.random() < self._mistakes else right)
        return tuple(tokens[sequence.num_tokens :])


class _SlowSlots(HostSlots):
    """Copies take a while, and are caught in the middle."""

    def __init__(self, num_slots: int, block_bytes: int, rng: Random) -> None:
        super().__init__(num_slots, block_bytes)
        self._rng = rng

    def write(self, entry: Entry, source: Bytes) -> int:
        half = source.nbytes // 2
        self.buffer[entry.slot, :half] = source[:half]
        time.sleep(self._rng.choice([0, 0, 0.0002, 0.001]))
        self.buffer[entry.slot, half:] = source[half:]
        return checksum(self.buffer[entry.slot].data)

    def read(self, entry: Entry, target: Bytes) -> None:
        time.sleep(self._rng.choice([0, 0, 0.0002, 0.001]))
        super().read(entry, target)


def _drafter(rng: Random, config: SpeculativeConfig, pool: BlockPool) -> tuple[SpeculativeConfig, Drafter]:
    most = rng.choice([3, 8, 64])
    book = DraftBook(BLOCK_SIZE, pool.generations)
    model = FakeDraftModel(pool.num_blocks, BLOCK_SIZE, rng, max_catch_up_tokens=most)
    drafter = Drafter(
        model, book, max_position=rng.choice([20, 512]), max_catch_up_tokens=most, eos_token_ids=frozenset({EOS})
    )
    return config, drafter


def _run_workload(
    seed: int,
    *,
    speculates: bool = False,
    has_draft_model: bool = False,
    num_host_blocks: int = 0,
    windows: tuple[int | None, ...] = (None,),
    is_async: bool = False,
) -> Counter[str]:
    """Runs one workload, checks everything, and says what happened in it."""
    rng = Random(seed)
    config = SpeculativeConfig(
        num_speculative_tokens=rng.choice([1, 3, 9]), least_acceptance=rng.choice([0.0, 0.9]), pause_steps=2
    )
    num_spare, most = rng.choice([10, 10, 11, 14, 40]) - 10, rng.choice([5, 6, 8, 64])
    harness = Harness(
        num_blocks=plan_groups(windows, block_size=BLOCK_SIZE, max_chunk=most).num_pool_blocks(40) + num_spare,
        windows=windows,
        max_num_batched_tokens=most,
        max_num_seqs=rng.choice([1, 2, 3, 5]),
        enable_caching=rng.random() < 0.75 or num_host_blocks > 0,
        speculator=Speculator(config, Guesser(Random(seed))) if speculates else None,
        make_drafter=partial(_drafter, Random(seed), config) if has_draft_model else None,
        num_host_blocks=num_host_blocks,
        is_async=is_async,
        wrap_slots=lambda slots: _SlowSlots(slots.num_slots, 8 * BLOCK_SIZE, Random(seed)),
    )
    harness.runner.runs_early = seed % 3 == 0
    seen: Counter[str] = Counter()
    for number in range(rng.randint(2, 9)):
        request = _request(rng, f"r{number}")
        if not request.prefill_only and rng.random() < 0.4:
            request = _with_adopted(rng, harness, request)
        harness.add(request)
        for _ in range(rng.choice([0, 1, 3, 8])):
            harness.step()
            if rng.random() < 0.3:
                harness.release_held()  # else transfers hold the blocks for a while
        if rng.random() < 0.15:
            harness.abort(f"r{rng.randint(0, number)}")
        if harness.tiers is not None and rng.random() < 0.5:
            harness.tiers.quiesce()  # else a busy machine might never get to write anything
        if rng.random() < (0.5 if num_host_blocks else 0.1):
            harness.cache.reset()
        if harness.tiers is not None and rng.random() < 0.1:
            harness.tiers.clear(rng.choice([None, Owned.by_tenant("salt")]))
        seen["adopted"] += request.adopted is not None
        seen["resumed"] += bool(request.choices)
    harness.run_with_release()
    harness.check_outputs()
    harness.check_idle()
    seen["preempted"] += harness.scheduler.num_preemptions
    seen["copied"] += harness.runner.num_copies
    seen["hit"] += harness.cache.stats().num_hit_tokens
    seen["evicted"] += harness.cache.stats().num_evictions
    seen["aborted"] += len(harness.aborted)
    seen["drafted"] += harness.num_drafted
    seen["accepted"] += harness.num_accepted
    seen["ahead"] += harness.runner.num_ahead
    seen["loaded"] += sum(tokens for tiers in harness.loaded.values() for tokens in tiers.values())
    return seen


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, speculates=st.booleans())
def test_tokens_equal_the_oracle(seed: int, speculates: bool) -> None:
    _run_workload(seed, speculates=speculates)


WINDOWS = ((None, 5, 5), (5,), (None, 1), (None, None, 9, 9), (8,), (3, 7, None))


@settings(max_examples=120, deadline=None)
@given(seed=SEEDS, speculates=st.booleans(), windows=st.sampled_from(WINDOWS))
def test_tokens_equal_the_oracle_with_windows(seed: int, speculates: bool, windows: tuple[int | None, ...]) -> None:
    """Each KV group shows each token what its window covers, whatever was given back, shared or rolled back."""
    _run_workload(seed, speculates=speculates, windows=windows)


def test_the_workloads_with_windows_are_hard() -> None:
    workloads = (
        _run_workload(seed, speculates=seed % 2 == 0, windows=WINDOWS[seed % len(WINDOWS)]) for seed in range(60)
    )
    seen = sum(workloads, Counter[str]())
    wanted = ("adopted", "resumed", "preempted", "copied", "hit", "evicted", "aborted", "accepted")
    assert not {what: seen[what] for what in wanted if seen[what] < 20}


def test_the_workloads_are_hard() -> None:
    """The test above is worth something only if everything that could go wrong takes place."""
    seen = sum((_run_workload(seed, speculates=seed % 2 == 0) for seed in range(60)), Counter[str]())
    seen["rejected"] = seen["drafted"] - seen["accepted"]
    wanted = ("adopted", "resumed", "preempted", "copied", "hit", "evicted", "aborted", "accepted", "rejected")
    too_rare = {what: seen[what] for what in wanted if seen[what] < 20}
    assert not too_rare


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, windows=st.sampled_from(((None,), *WINDOWS)), num_host_blocks=st.sampled_from((0, 0, 0, 6)))
def test_tokens_equal_the_oracle_when_steps_run_late(
    seed: int, windows: tuple[int | None, ...], num_host_blocks: int
) -> None:
    """A step is started before the one in front of it has run: what ends or comes in between must not meet it."""
    tiers = 0 if None not in windows else num_host_blocks
    _run_workload(seed, is_async=True, windows=windows, num_host_blocks=tiers)


@pytest.mark.parametrize("seed", [810018808, 2593603348])
def test_no_step_is_planned_ahead_that_copies_what_the_running_one_writes(seed: int) -> None:
    """Two in some ten thousand workloads: a branch's block was copied again while a step wrote to it."""
    _run_workload(seed, is_async=True)


def test_the_workloads_whose_steps_run_late_are_hard() -> None:
    seen = sum((_run_workload(seed, is_async=True) for seed in range(60)), Counter[str]())
    wanted = ("ahead", "adopted", "resumed", "preempted", "copied", "hit", "evicted", "aborted")
    assert not {what: seen[what] for what in wanted if seen[what] < 20}


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_tokens_equal_the_oracle_with_a_draft_model(seed: int) -> None:
    """`FakeDraftModel` looks at all that the draft's KV shows: whatever moved, it is that of the sequence's tokens."""
    _run_workload(seed, has_draft_model=True)


def test_the_draft_model_is_tried_hard() -> None:
    seen = sum((_run_workload(seed, has_draft_model=True) for seed in range(40)), Counter[str]())
    seen["rejected"] = seen["drafted"] - seen["accepted"]
    wanted = ("adopted", "preempted", "copied", "hit", "evicted", "aborted", "accepted", "rejected")
    assert not {what: seen[what] for what in wanted if seen[what] < 15}


def test_tokens_equal_the_oracle_with_a_tier() -> None:
    """CASES F5, F6: stores and loads race with evictions, aborts and clears; never a wrong token, never a leak."""
    workloads = (
        _run_workload(seed, num_host_blocks=3 + 9 * (seed % 3), has_draft_model=seed % 4 == 0) for seed in range(25)
    )
    seen = sum(workloads, Counter[str]())
    assert seen["loaded"] >= 8  # 16 to 32 here: it depends on which thread is first
    assert seen["aborted"] >= 5


def test_a_copy_is_made_though_taking_its_block_has_evicted_what_was_before_the_source() -> None:
    """Where all groups slide that forgets the source: a block taken for its copy belonged to nobody."""
    _run_workload(3787615858, windows=(5,))


@pytest.mark.nightly
def test_thousands_of_workloads_that_are_new_each_night() -> None:
    """Some faults are met by one in ten thousand. Which seeds are drawn is in the message of what fails."""
    rng = Random()
    for _ in range(6000):
        windows = rng.choice(((None,), (None,), *WINDOWS))
        is_plain = windows == (None,)
        options: dict[str, bool] = rng.choice(
            ({"is_async": True}, {"speculates": True}, {"speculates": False}, {"has_draft_model": is_plain})
        )
        seed = rng.randrange(2**32)
        try:
            _run_workload(seed, windows=windows, **options)
        except Exception as error:
            raise AssertionError(f"_run_workload({seed}, windows={windows}, **{options})") from error

"""Blocks that the pool has lost come back from host memory: the same tokens, nothing leaks, nobody else waits."""

import threading
from collections.abc import Iterator

import pytest

from engine.tiers.host_slots import HostSlots
from engine.tiers.tier import Bytes, Slots
from kvstore.tier_block import Entry
from tests.engine.harness import Harness, prompt_of

WAIT = 30.0
PROMPT = prompt_of(22, salt=3)  # five full blocks and a rest


class Gate(HostSlots):
    """Writes and reads wait until they may; `arrived` says that one does."""

    def __init__(self, slots: Slots) -> None:
        assert isinstance(slots, HostSlots)
        super().__init__(*slots.buffer.shape)
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.arrived = threading.Event()

    def write(self, entry: Entry, source: Bytes) -> int:
        digest = super().write(entry, source)
        self.arrived.set()
        assert self.may_write.wait(WAIT)
        return digest

    def read(self, entry: Entry, target: Bytes) -> None:
        self.arrived.set()
        assert self.may_read.wait(WAIT)
        super().read(entry, target)


class Case(Harness):
    """A harness whose tier has a gate."""

    @property
    def gate(self) -> Gate:
        assert self.tiers is not None
        slots = self.tiers.tiers[0].slots
        assert isinstance(slots, Gate)
        return slots

    def warm(self, prompt: list[int], salt: str = "") -> None:
        """The prompt's blocks are in the tier and no longer on the device."""
        self.ask(f"warm{len(self.requests)}", prompt, max_tokens=1, cache_salt=salt)
        self.run()
        assert self.tiers is not None
        assert self.tiers.quiesce()
        self.cache.reset()
        assert self.cache.num_cached == 0

    def step_until_loading(self) -> None:
        """One step; then the loader waits at the gate."""
        self.gate.may_read.clear()
        self.gate.arrived.clear()
        self.step()
        assert self.gate.arrived.wait(WAIT)


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case(num_blocks=16, num_host_blocks=32, wrap_slots=Gate)
    yield case
    case.gate.may_read.set()
    case.gate.may_write.set()
    case.check_outputs()
    case.check_idle()


def test_a_prompt_comes_back(case: Case) -> None:
    case.warm(PROMPT)
    case.ask("again", PROMPT, max_tokens=5)
    case.run()
    assert case.cached["again"] == 20
    assert case.loaded["again"] == {"host": 20}


@pytest.mark.parametrize("num_tokens", [4, 5, 8, 9])
def test_a_full_hit_leaves_a_token_to_compute(case: Case, num_tokens: int) -> None:
    """CASES F9: through the tier too."""
    prompt = prompt_of(num_tokens)
    case.warm(prompt)
    case.ask("again", prompt, max_tokens=3)
    case.run()
    assert case.cached["again"] == min(num_tokens // 4 * 4, num_tokens - 1)


def test_the_device_has_the_head_and_the_tier_the_rest(case: Case) -> None:
    case.warm(PROMPT)
    case.ask("head", PROMPT[:9], max_tokens=1)
    case.run()
    case.ask("again", PROMPT, max_tokens=3)
    case.run()
    assert (case.cached["again"], case.loaded["again"]) == (20, {"host": 12})


def test_evicted_blocks_come_back_without_a_reset(case: Case) -> None:
    case.ask("first", PROMPT, max_tokens=1)
    case.run()
    for number in range(4):  # 4 x 6 blocks through a pool of 16
        case.ask(f"other{number}", prompt_of(24, salt=30 + number), max_tokens=1)
        case.run()
        assert case.tiers is not None
        assert case.tiers.quiesce()
    case.ask("again", PROMPT, max_tokens=3)
    case.run()
    assert case.cached["again"] == 20
    assert case.loaded["again"]["host"] > 0


def test_another_tenant_finds_nothing(case: Case) -> None:
    """CASES D5: the salt is in the tier's keys as well."""
    case.warm(PROMPT, salt="a")
    case.ask("b", PROMPT, max_tokens=1, cache_salt="b")
    case.ask("a", PROMPT, max_tokens=1, cache_salt="a")
    case.run()
    assert (case.cached["b"], case.cached["a"]) == (0, 20)


def test_others_pass_who_waits_for_a_load(case: Case) -> None:
    """CASES E3: a load holds up its own request alone."""
    case.warm(PROMPT)
    case.ask("loads", PROMPT, max_tokens=1)
    case.step_until_loading()
    case.ask("passes", 6, max_tokens=2)
    while "passes" not in case.cached or ("passes", 0) not in case.reasons:
        case.step()
    assert "loads" not in case.cached
    case.gate.may_read.set()
    case.run()
    assert case.cached["loads"] == 20


def test_equal_prompts_wait_for_one_load(case: Case) -> None:
    case.warm(PROMPT)
    for name in "abc":
        case.ask(name, PROMPT, max_tokens=1)
    case.step_until_loading()
    case.step()
    assert case.cache.num_referenced == 5
    case.gate.may_read.set()
    case.run()
    assert [case.loaded[name] for name in "abc"] == [{"host": 20}, {}, {}]
    assert [case.cached[name] for name in "abc"] == [20, 20, 20]


def test_abort_during_a_load_gives_the_blocks_back(case: Case) -> None:
    """CASES A4, A5, A6: not while somebody still writes to them."""
    case.warm(PROMPT)
    case.ask("gone", PROMPT, max_tokens=1)
    case.step_until_loading()
    assert case.abort("gone")
    assert case.cache.num_referenced == 5
    case.gate.may_read.set()
    assert case.tiers is not None
    assert case.tiers.quiesce()
    assert case.cache.num_referenced == 0


def test_a_load_is_not_preempted(case: Case) -> None:
    """Its blocks are written to; who needs room waits or takes it from others."""
    case.warm(PROMPT)
    case.ask("loads", PROMPT, max_tokens=1, priority=1)
    case.step_until_loading()
    case.ask("urgent", 36, max_tokens=4, priority=-1)
    for _ in range(3):
        case.step()
    assert case.cache.num_referenced >= 5
    case.gate.may_read.set()
    case.run()


def test_a_corrupt_block_is_computed_and_not_offered_again(case: Case) -> None:
    case.warm(PROMPT)
    case.gate.buffer[2, 5] ^= 1  # the third block: slots are taken in order
    case.ask("again", PROMPT, max_tokens=4)
    case.run()
    assert case.cached["again"] == 8
    assert case.tiers is not None
    assert case.tiers.num_corrupt == {"host": 1}
    assert case.tiers.quiesce()
    assert case.tiers.tiers[0].num_ready >= 5  # written again, right


def test_a_half_written_block_is_not_found(case: Case) -> None:
    """CASES F12."""
    case.gate.may_write.clear()
    case.gate.arrived.clear()
    case.ask("first", PROMPT, max_tokens=1)
    case.run()
    assert case.gate.arrived.wait(WAIT)
    case.cache.reset()
    case.ask("again", PROMPT, max_tokens=1)
    case.run()
    assert case.cached["again"] == 0
    case.gate.may_write.set()


def test_a_block_reused_while_it_was_copied_is_not_stored(case: Case) -> None:
    """CASES F5: the copy may be of two contents."""
    case.gate.may_write.clear()
    case.gate.arrived.clear()
    case.ask("first", PROMPT, max_tokens=1)
    case.run()
    assert case.gate.arrived.wait(WAIT)
    blocks = case.cache.allocate(16)
    assert blocks is not None
    case.runner.slots[:] = 77
    case.gate.may_write.set()
    assert case.tiers is not None
    assert case.tiers.quiesce()
    assert case.tiers.tiers[0].num_ready == 0
    case.cache.release(blocks)
    case.ask("again", PROMPT, max_tokens=4)
    case.run()
    assert case.cached["again"] == 0


def test_a_cleared_tier_has_nothing(case: Case) -> None:
    case.warm(PROMPT)
    assert case.tiers is not None
    assert case.tiers.clear() == 5
    case.ask("again", PROMPT, max_tokens=1)
    case.run()
    assert case.cached["again"] == 0


def test_a_chain_in_use_stays_in_the_tier(case: Case) -> None:
    """Hits on the device count as use: of two chains the one that nobody asks for goes."""
    case.ask("hot", PROMPT, max_tokens=1)
    case.run()
    for number in range(9):  # 9 x 4 blocks and the hot 5 are more than 32
        case.ask(f"cold{number}", 17, max_tokens=1)
        case.ask(f"hot{number}", PROMPT, max_tokens=1)
        case.run()
        assert case.tiers is not None
        assert case.tiers.quiesce()
    case.cache.reset()
    case.ask("again", PROMPT, max_tokens=1)
    case.run()
    assert case.loaded["again"] == {"host": 20}


def test_a_request_that_needs_its_whole_prompt_computed_loads_nothing(case: Case) -> None:
    case.warm(PROMPT)
    case.ask("again", PROMPT, max_tokens=1, prompt_logprobs=1)
    (item,) = case.scheduler.schedule().items
    assert item.num_new_tokens == 16
    case.abort("again")


def test_a_preempted_sequence_loads_instead_of_computing() -> None:
    """What it had computed is in the tier when it gets its turn again."""
    computed = []
    for num_host_blocks in (0, 64):
        harness = Harness(num_blocks=12, max_model_len=48, num_host_blocks=num_host_blocks)
        for name in "abc":
            harness.ask(name, 12, max_tokens=30, ignore_eos=True)
        for _ in range(2000):
            if not harness.scheduler.has_work:
                break
            harness.step()
            if harness.tiers is not None:
                assert harness.tiers.quiesce()
        assert harness.scheduler.num_preemptions > 0
        harness.check_outputs()
        harness.check_idle()
        computed.append(sum(num for step in harness.runner.steps for _, _, num in step))
    assert computed[1] < computed[0]
    assert computed[1] < 3 * (12 + 30) + harness.scheduler.num_preemptions * 2 * harness.block_size


@pytest.mark.parametrize("when", ["it waits", "it loads"])
def test_a6_an_abort_of_a_preempted_request_leaves_nothing_below(when: str) -> None:
    """CASES A6: its blocks stay in the tier as what they are, cached and nobody's: anybody's to evict or to clear."""
    case = Case(num_blocks=12, max_model_len=48, num_host_blocks=64, wrap_slots=Gate)
    for name in "abc":
        case.ask(name, 12, max_tokens=30, ignore_eos=True)
    while not case.scheduler.num_preemptions:
        case.step()
    (victim,) = (sequence for sequence in case.scheduler._queues.waiting if sequence.num_output_tokens)
    assert case.tiers is not None
    assert case.tiers.quiesce()
    if when == "it loads":
        case.gate.may_read.clear()
        case.gate.arrived.clear()
        while not case.gate.arrived.is_set():
            case.step()
    assert case.abort(victim.request.request_id)
    case.gate.may_read.set()
    case.run()
    assert case.tiers.quiesce()
    tier = case.tiers.tiers[0]
    assert tier.num_ready
    tier.check_integrity(is_quiet=True)
    case.tiers.clear()
    assert (tier.num_ready, tier._book.num_free) == (0, tier.num_slots)
    case.check_outputs()
    case.check_idle()

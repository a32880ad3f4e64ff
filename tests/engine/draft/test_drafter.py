"""Who is drafted for, who catches up first and how fast, and that a broken draft model costs nothing but speed."""

from random import Random

import pytest

from engine.draft.book import DraftBook
from engine.draft.drafter import PLANNED, Drafter
from kvstore.block_pool import BlockPool
from pagewire.speculative import SpeculativeConfig
from tests.engine.draft.fake_model import FakeDraftModel
from tests.engine.fake_runner import EOS
from tests.engine.harness import BLOCK_SIZE, Harness, prompt_of

CONFIG = SpeculativeConfig(num_speculative_tokens=4, least_acceptance=0.0)


def drafting(
    mistakes: float = 0.0, *, max_catch_up_tokens: int = 64, max_position: int = 512, **fields: int
) -> tuple[Harness, FakeDraftModel]:
    models: list[FakeDraftModel] = []

    def make(pool: BlockPool) -> tuple[SpeculativeConfig, Drafter]:
        models.append(
            FakeDraftModel(
                pool.num_blocks, BLOCK_SIZE, Random(1), max_catch_up_tokens=max_catch_up_tokens, mistakes=mistakes
            )
        )
        return CONFIG, Drafter(
            models[0],
            DraftBook(BLOCK_SIZE, pool.generations),
            max_position=max_position,
            max_catch_up_tokens=max_catch_up_tokens,
            eos_token_ids=frozenset({EOS}),
        )

    harness = Harness(make_drafter=make, **{"num_blocks": 40, "max_num_batched_tokens": 64, **fields})
    return harness, models[0]


def finish(harness: Harness) -> None:
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def test_one_forward_for_each_drafted_position() -> None:
    harness, model = drafting()
    for name, length in (("a", 5), ("b", 9)):
        harness.ask(name, prompt_of(length, salt=length), max_tokens=11, ignore_eos=True)
    harness.step()
    assert not model.runs, "nothing is drafted while the prompts are computed"
    harness.step()
    first, *rest = model.runs
    assert first == [("a", 0, 6, True), ("b", 0, 10, True)], "the draft reads the prompts"
    assert rest == [[("a", 6 + i, 7 + i, True), ("b", 10 + i, 11 + i, True)] for i in range(3)]
    model.runs.clear()
    harness.step()
    assert model.runs[0] == [("a", 9, 11, True), ("b", 13, 15, True)], "the last draft and the token after it"
    assert harness.num_accepted == harness.num_drafted == 16
    finish(harness)


def test_rejected_drafts_leave_nothing_behind() -> None:
    harness, model = drafting(mistakes=1.0)
    harness.ask("a", 6, max_tokens=12, ignore_eos=True)
    finish(harness)
    firsts = [run for run in model.runs if run[0][2] - run[0][1] != 1 or run[0][3]]
    assert firsts[0] == [("a", 0, 7, True)]
    assert harness.num_accepted == 0 < harness.num_drafted


def test_a_long_prompt_is_read_in_pieces_and_holds_nobody_up() -> None:
    harness, model = drafting(max_catch_up_tokens=8, max_model_len=80)
    harness.ask("long", 30, max_tokens=30, ignore_eos=True)
    harness.step()
    harness.ask("short", 3, max_tokens=30, ignore_eos=True)
    harness.step()
    harness.step()
    assert model.runs[0] == [("long", 0, 8, False)]
    assert model.runs[1][:2] == [("short", 0, 4, True), ("long", 8, 12, False)], "the shortest first"
    model.runs.clear()
    harness.step()
    assert ("long", 12, 20, False) in model.runs[0]
    finish(harness)


def test_who_is_catching_up_takes_no_budget_from_who_drafts() -> None:
    harness, model = drafting(max_catch_up_tokens=8, max_model_len=80, max_num_batched_tokens=8)
    harness.ask("long", 40, max_tokens=30, ignore_eos=True)
    while not model.runs:
        harness.step()
    harness.ask("short", 3, max_tokens=30, ignore_eos=True)
    harness.step()
    planned = {item.sequence.request_id: len(item.draft_token_ids) for item in harness.scheduler.schedule().items}
    assert planned == {"long": 1, "short": 4}
    finish(harness)


def test_the_prompt_of_several_choices_is_read_once() -> None:
    harness, model = drafting(max_model_len=60)
    harness.ask("a", 4 * BLOCK_SIZE + 1, n=3, max_tokens=12, ignore_eos=True)
    harness.step()
    harness.step()
    assert model.runs[0] == [("a", 0, 4 * BLOCK_SIZE + 2, True)]
    model.runs.clear()
    harness.step()
    starts = sorted(start for _, start, _, _ in model.runs[0])
    assert starts[:2] == [4 * BLOCK_SIZE] * 2, "the others find what the first has read"
    finish(harness)


def test_a_cached_prefix_has_been_read() -> None:
    harness, model = drafting()
    harness.ask("a", prompt_of(12), max_tokens=6, ignore_eos=True)
    harness.run()
    model.runs.clear()
    harness.ask("b", prompt_of(12), max_tokens=7, ignore_eos=True)
    finish(harness)
    assert model.runs[0] == [("b", 12, 13, True)]


@pytest.mark.parametrize(("max_tokens", "reads"), [(4, False), (5, True), (None, True)])
def test_who_ends_soon_does_not_read_a_long_prompt(max_tokens: int | None, reads: bool) -> None:
    harness, model = drafting(max_model_len=120)
    harness.ask("a", 50, max_tokens=max_tokens, ignore_eos=True)
    harness.step()
    harness.step()
    assert bool(model.runs) == reads
    finish(harness)


def test_drafts_end_where_the_draft_model_does() -> None:
    harness, model = drafting(max_position=12, max_model_len=40)
    harness.ask("a", 6, max_tokens=20, ignore_eos=True)
    finish(harness)
    assert max(end for run in model.runs for _, _, end, _ in run) == 12
    assert harness.num_accepted > 0


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    plain = Harness(num_blocks=40, max_num_batched_tokens=64)
    plain.ask("a", 6, max_tokens=12, ignore_eos=True)
    plain.run()
    third = plain.tokens["a", 0][2]
    harness, _ = drafting()
    harness.ask("a", 6, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    finish(harness)
    assert (harness.num_drafted, harness.num_accepted) == (2, 2)


def test_a_broken_draft_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    harness, model = drafting()
    harness.ask("a", 6, max_tokens=20, ignore_eos=True)
    harness.step()
    harness.step()
    model.fail_next = harness.may_break = True
    num_runs = len(model.runs)
    finish(harness)
    assert len(model.runs) == num_runs
    assert caplog.text.count("the draft model has failed") == 1
    assert harness.num_accepted == 4


def test_plans_are_no_tokens() -> None:
    harness, _ = drafting()
    harness.ask("a", 6, max_tokens=20, ignore_eos=True)
    harness.step()
    (item,) = harness.scheduler.schedule().items
    assert item.draft_token_ids == (PLANNED,) * 4
    assert item.num_new_tokens == 5

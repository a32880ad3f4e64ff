"""Adapters in the scheduler: no more at once than there are places, and nobody waits for ever for one."""

import pytest

from engine.request import AdapterId, EngineRequest
from pagewire.sampling import SamplingParams
from tests.engine.harness import Harness, prompt_of


def harness(max_loras: int) -> Harness:
    return Harness(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_loras=max_loras)


def add(made: Harness, name: str, adapter: str, num_tokens: int = 6) -> None:
    own = AdapterId(adapter, adapter.encode(), 1) if adapter else None
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    made.add(EngineRequest(name, tuple(prompt_of(5, salt=len(made.requests))), params, adapter=own))


def running(made: Harness) -> list[str]:
    return sorted(sequence.request_id for sequence in made.scheduler._queues.running)


def test_a_step_has_no_more_adapters_than_places() -> None:
    made = harness(max_loras=2)
    for name, adapter in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "c"), ("5", ""), ("6", "a"), ("7", "d")):
        add(made, name, adapter)
    load = made.step().load
    assert running(made) == ["1", "2", "3", "5"], "6 must not pass 4, which waits for a place"
    assert (load.running_adapters, load.waiting_adapters) == (("a", "b"), ("a", "c", "d"))
    while made.scheduler.has_work:
        output = made.step()
        assert len(output.load.running_adapters) <= 2
    made.check_outputs()


def test_a_stream_of_requests_for_what_runs_does_not_keep_another_waiting() -> None:
    made = harness(max_loras=1)
    add(made, "first", "a", 4)
    made.step()
    add(made, "other", "b", 4)
    for i in range(40):
        add(made, f"more {i}", "a", 4)
        made.step()
        if ("other", 0) in made.reasons:
            return
    pytest.fail("it starves")

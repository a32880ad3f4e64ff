"""What the router assumes of its own decisions, on a virtual clock."""

from router.assumptions import AssumedLoad, Assumptions
from tests.kvstore.simulated import chain


def test_hits_are_assumed_for_two_seconds_and_load_for_a_quarter() -> None:
    assumptions, prompt = Assumptions(), chain(5)
    assumptions.note_routed("w", prompt[:3], 10.0, num_tokens=12)
    assert assumptions.hits(prompt, ["w", "other"], 10.1) == {"w": 3, "other": 0}
    assert assumptions.loads(10.1).get("w", AssumedLoad()) == AssumedLoad(12, 1)
    assert assumptions.loads(10.1).get("other", AssumedLoad()) == AssumedLoad()
    assert assumptions.loads(10.25).get("w", AssumedLoad()) == AssumedLoad()
    assert assumptions.hits(prompt, ["w"], 11.99) == {"w": 3}
    assert assumptions.hits(prompt, ["w"], 12.0) == {"w": 0}


def test_a_later_request_keeps_shared_blocks_longer() -> None:
    assumptions, prompt = Assumptions(), chain(5)
    assumptions.note_routed("w", prompt[:3], 0.0, num_tokens=10)
    assumptions.note_routed("w", prompt[:2], 1.0, num_tokens=2, num_sequences=3)
    assert assumptions.loads(1.1).get("w", AssumedLoad()) == AssumedLoad(2, 3)
    assert assumptions.hits(prompt, ["w"], 1.9) == {"w": 3}
    assert assumptions.hits(prompt, ["w"], 2.5) == {"w": 2}
    assert assumptions.hits(prompt, ["w"], 3.0) == {"w": 0}


def test_a_worker_that_died_has_nothing() -> None:
    assumptions, prompt = Assumptions(), chain(3)
    assumptions.note_routed("w", prompt, 0.0, num_tokens=10)
    assumptions.note_routed("other", prompt[:1], 0.0)
    assumptions.forget_worker("w")
    assumptions.forget_worker("never seen")
    assert assumptions.hits(prompt, ["w", "other"], 0.1) == {"w": 0, "other": 1}
    assert assumptions.loads(0.1).get("w", AssumedLoad()) == AssumedLoad()
    assumptions.note_routed("w", prompt[:2], 0.2)
    assert assumptions.hits(prompt, ["w"], 1.0) == {"w": 2}
    assert assumptions.hits(prompt, ["w", "other"], 9.0) == {"w": 0, "other": 0}

"""What the router assumes of its own decisions, on a virtual clock."""

from random import Random

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


def test_load_is_the_sum_of_the_last_quarter_of_a_second() -> None:
    """Kept, not added up: it must be what adding up would give, whatever was forgotten on the way."""
    rng, assumptions, sent = Random(0), Assumptions(), list[tuple[float, str, int, int]]()
    now = 0.0
    for _ in range(2000):
        now += rng.choice((0.0, 0.001, 0.05, 0.3))
        worker_id = rng.choice("abc")
        if rng.random() < 0.05:
            assumptions.forget_worker(worker_id)
            sent = [each for each in sent if each[1] != worker_id]
        elif rng.random() < 0.7:
            sent.append((now, worker_id, rng.randrange(50), rng.randrange(1, 3)))
            assumptions.note_routed(worker_id, (), now, num_tokens=sent[-1][2], num_sequences=sent[-1][3])
        recent = [each for each in sent if each[0] > now - 0.25]
        assert assumptions.loads(now) == {
            name: AssumedLoad(
                sum(each[2] for each in recent if each[1] == name), sum(each[3] for each in recent if each[1] == name)
            )
            for name in {each[1] for each in recent}
        }


def test_names_that_are_never_used_again_are_not_remembered() -> None:
    assumptions, prompt = Assumptions(), chain(2)
    for number in range(100):
        assumptions.note_routed(f"pod-{number}", prompt, float(number))
        assumptions.keep_only({f"pod-{number}"})
    assert set(assumptions._index.workers()) == {"pod-99"}
    assert assumptions.hits(prompt, ["pod-98", "pod-99"], 99.5) == {"pod-98": 0, "pod-99": 2}


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

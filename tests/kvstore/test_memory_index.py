"""The in-memory index against the plainest model: a set per worker."""

from random import Random

import pytest

from kvstore.memory_index import MemoryIndex
from kvstore.registry import WorkerRecord
from tests.kvstore.simulated import chain


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(worker_id, "127.0.0.1:1", "decode", 1)


def depth_in(held: set[bytes], prompt: list[bytes]) -> int:
    return next((n for n, key in enumerate(prompt) if key not in held), len(prompt))


def test_any_changes_equal_a_set_per_worker() -> None:
    """Holdings stay prefix-closed, as a worker's are; the prompts share beginnings."""
    rng, index, model = Random(0), MemoryIndex(), dict[str, set[bytes]]()
    shared = [key[:16] for key in chain(6)]
    prompts = [shared[: rng.randrange(7)] + [key[:16] for key in chain(9)] for _ in range(5)]
    for _ in range(3000):
        worker_id, prompt = f"w{rng.randrange(70)}", rng.choice(prompts)
        keys = prompt[: rng.randint(1, len(prompt))]
        match rng.choices(["register", "unregister", "store", "remove", "clear"], [2, 1, 10, 6, 2])[0]:
            case "register":
                index.register(record(worker_id), keys)
                model[worker_id] = set(keys)
            case "unregister":
                index.unregister(worker_id)
                model.pop(worker_id, None)
            case action if worker_id in model:
                if action == "store":
                    index.store(worker_id, keys)
                    model[worker_id] |= set(keys)
                elif action == "remove":
                    tails = {key for each in prompts if keys[-1] in each for key in each[len(keys) - 1 :]}
                    index.remove(worker_id, sorted(tails))
                    model[worker_id] -= tails
                else:
                    index.clear(worker_id)
                    model[worker_id].clear()
        for asked in (prompt, prompt[:1], []):
            expected = {each: depth_in(held, asked) for each, held in model.items()}
            assert index.lookup(asked) == expected
            some = [*rng.sample(sorted(model), min(3, len(model))), "stranger"]
            assert index.lookup(asked, some) == {each: expected.get(each, 0) for each in some}
    index.check_integrity()
    assert {worker_id: set(index.blocks(worker_id)) for worker_id in index.workers()} == model
    assert index.num_blocks == sum(map(len, model.values()))


def test_what_was_known_of_a_chain_is_never_believed() -> None:
    """Many depths, so that chains are remembered; every change and every length of the prompt is seen at once."""
    rng, index, prompt = Random(1), MemoryIndex(), [key[:16] for key in chain(40)]
    other = prompt[:25] + [key[:16] for key in chain(15)]  # begins alike
    held = {f"w{number}": rng.randrange(41) for number in range(12)}
    for worker_id, depth in held.items():
        index.register(record(worker_id), prompt[:depth])
    for _ in range(1500):
        worker_id = rng.choice(sorted(held))
        match rng.randrange(5):
            case 0:
                index.store(worker_id, prompt)
                held[worker_id] = 40
            case 1 if held[worker_id]:
                index.remove(worker_id, prompt[held[worker_id] - 1 :])
                held[worker_id] -= 1
            case 2 if rng.random() < 0.1:
                index.clear(worker_id)
                held[worker_id] = 0
            case 3 if rng.random() < 0.1:  # its bit may become another's
                index.unregister(worker_id)
                del held[worker_id]
                new = f"n{rng.randrange(10**9)}"
                index.register(record(new), prompt[:5])
                held[new] = 5
        asked = rng.choice([prompt, prompt, prompt[: rng.randint(1, 40)], other])
        limit = 25 if asked is other else len(asked)
        some = None if rng.random() < 0.7 else [*rng.sample(sorted(held), 4), "stranger"]
        expected = {each: min(held.get(each, 0), limit) for each in (some or held)}
        assert index.lookup(asked, some) == expected
        assert index.lookup(asked, some) == expected, "the second time from what is known"
    assert index._known._chains
    index.check_integrity()


def test_bits_that_changed_hands_make_the_known_void() -> None:
    index, prompt = MemoryIndex(), [key[:16] for key in chain(9)]
    names = ["a", "b", "c", "d"]
    for order in (names, names[::-1]):  # the same bits hold the same keys, under other names
        for depth, name in enumerate(order, 2):
            index.register(record(name), prompt[:depth])
        expected = {name: 2 + order.index(name) for name in names}
        assert [index.lookup(prompt, names) for _ in range(3)] == 3 * [expected]
        for name in order:
            index.unregister(name)
            index.register(record("sweeper"))
            index.unregister("sweeper")
        assert not index._garbage


@pytest.mark.parametrize("num_stored", [1, 2, 3, 5])
def test_who_held_nothing_and_now_the_first_keys_is_seen(num_stored: int) -> None:
    """Before the first known place nothing is known but who holds the first key."""
    index, prompt = MemoryIndex(), [key[:16] for key in chain(9)]
    depths = {"a": 3, "b": 5, "c": 7, "d": 8, "e": 0}
    for name, depth in depths.items():
        index.register(record(name), prompt[:depth])
    holders = ["a", "b", "c", "d"]
    assert [index.lookup(prompt, holders) for _ in range(3)] == 3 * [{name: depths[name] for name in holders}]
    assert [index.lookup(prompt) for _ in range(3)] == 3 * [depths]
    index.store("e", prompt[:num_stored])
    assert [index.lookup(prompt) for _ in range(3)] == 3 * [depths | {"e": num_stored}]
    index.remove("e", prompt[:num_stored])
    assert index.lookup(prompt) == depths


def test_a_list_that_the_caller_changes_is_another_question() -> None:
    index, prompt = MemoryIndex(), [key[:16] for key in chain(9)]
    for depth in range(1, 7):
        index.register(record(f"w{depth}"), prompt[:depth])
    asked = [f"w{depth}" for depth in range(1, 6)]
    assert [len(index.lookup(prompt, asked)) for _ in range(3)] == [5, 5, 5]
    asked.append("w6")
    assert index.lookup(prompt, asked)["w6"] == 6


def test_a_longer_prompt_is_looked_up_beyond_what_is_known() -> None:
    index, prompt = MemoryIndex(), [key[:16] for key in chain(12)]
    for depth in (2, 4, 6, 8, 12):
        index.register(record(f"w{depth}"), prompt[:depth])
    for length in (8, 12, 8, 5):
        expected = {f"w{depth}": min(depth, length) for depth in (2, 4, 6, 8, 12)}
        assert [index.lookup(prompt[:length]) for _ in range(3)] == 3 * [expected]


def test_known_chains_are_bounded() -> None:
    index = MemoryIndex()
    for number in range(8):
        index.register(record(f"w{number}"))
    for _ in range(400):
        prompt = [key[:16] for key in chain(9)]
        for number in range(8):
            index.store(f"w{number}", prompt[: number + 1])
        assert index.lookup(prompt) == {f"w{number}": number + 1 for number in range(8)}
    assert len(index._known._chains) == 256


def test_clearing_is_swept_up_by_later_changes() -> None:
    index, many = MemoryIndex(), [key[:16] for key in chain(5000)]
    index.register(record("big"), many)
    index.register(record("other"), many[:10])
    for _ in range(3):
        index.clear("big")
        assert index.lookup(many[:20]) == {"big": 0, "other": 10}
        index.store("big", many[:20])
        assert index.lookup(many[:20]) == {"big": 20, "other": 10}
        index.check_integrity()
    for key in many[20:60]:
        index.store("other", [key])
    assert not index._garbage
    assert len(index._holders) == 60
    index.check_integrity()


def test_a_bit_is_not_used_again_before_it_is_swept() -> None:
    index, many = MemoryIndex(), [key[:16] for key in chain(5000)]
    index.register(record("old"), many)
    index.unregister("old")
    index.register(record("new"))
    assert index.lookup(many) == {"new": 0}
    index.check_integrity()

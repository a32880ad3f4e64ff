"""The in-memory index against the plainest model: a set per worker."""

from random import Random

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

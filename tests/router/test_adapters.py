"""Which adapter a request means, and which worker gets it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvstore.hashing import adapter_key, block_keys
from pagewire.errors import InvalidArgument, NotFound
from pagewire.worker_view import AdapterLabel, AdapterView, LoadSnapshot
from router.adapters import newest, resolve_adapter
from router.cost import Candidate, RequestSize, Weights, decode_cost, prefill_cost
from router.policy import obstacle
from router.prompt_keys import PromptKeys
from tests.router.test_policy import worker

A, B = AdapterLabel("a", b"A" * 32, 3), AdapterLabel("b", b"B" * 32, 4)
KNOWN: Mapping[str, AdapterLabel] = {"a": A, "b": B}


def test_a_name_in_place_of_the_models_or_beside_it() -> None:
    for adapter, model, found in (("", "", None), ("", "base", None), ("a", "", A), ("", "a", A), ("b", "base", B),
                                  ("a", "a", A)):  # fmt: skip
        assert resolve_adapter(adapter, model, "base", KNOWN) is found


def test_names_that_nobody_serves() -> None:
    with pytest.raises(NotFound, match="model 'c' is not served here; known models: 'base', 'a', 'b'") as model:
        resolve_adapter("", "c", "base", KNOWN)
    assert model.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(NotFound, match="adapter 'c' is not known; known adapters: 'a', 'b'") as adapter:
        resolve_adapter("c", "", "base", KNOWN)
    assert adapter.value.reason == "ADAPTER_NOT_FOUND"
    for long in ({"adapter": "x" * 100_000, "model": ""}, {"adapter": "", "model": "x" * 100_000}):
        with pytest.raises(NotFound) as refused:
            resolve_adapter(**long, model_name="base", adapters=KNOWN)
        assert len(refused.value.message) < 1000
    with pytest.raises(InvalidArgument, match="must be the adapter that `model` names, 'b'"):
        resolve_adapter("a", "b", "base", KNOWN)
    many = {f"n{i:03}": A for i in range(40)}
    with pytest.raises(NotFound, match="'n015' and 24 more"):
        resolve_adapter("x", "", "base", many)


def test_of_two_loads_of_a_name_the_later_counts() -> None:
    views = [
        AdapterView(label, 4, "", 0, False) for label in (A, replace(A, generation=9), replace(A, generation=5), B)
    ]
    assert newest(views) == {"a": replace(A, generation=9), "b": B}


def test_keys_are_those_of_the_engine() -> None:
    root, tokens = b"r" * 32, tuple(range(11))
    keys = PromptKeys(tokens, "salt", A)
    wanted = block_keys(root, tokens, 4, cache_salt="salt", adapter=adapter_key(A.digest, A.generation))
    assert keys.of((root, 4)) == [key[:16] for key in wanted]
    for other in (None, B, replace(A, generation=4)):
        assert PromptKeys(tokens, "salt", other).of((root, 4))[0] != keys.of((root, 4))[0]


def test_who_lacks_it_cannot_take_the_request_and_who_has_it_at_hand_is_cheaper() -> None:
    size = RequestSize(10)
    for role, cost in (("prefill", prefill_cost), ("decode", decode_cost)):
        candidate: Candidate = worker("w", role)  # type: ignore[arg-type]
        assert obstacle(replace(candidate, has_adapter=False), size) == "lacks the adapter"
        there, elsewhere = (
            cost(candidate, size, Weights()),
            cost(replace(candidate, loads_adapter=True), size, Weights()),
        )
        assert elsewhere == {**there, "adapter": Weights().loaded_adapter}


def test_a_load_that_differs_in_its_adapters_is_another() -> None:
    assert LoadSnapshot(adapters=(AdapterView(A, 4, "", 0, False),)) != LoadSnapshot()

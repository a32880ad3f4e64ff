"""Every generation feature gives the same tokens, text and log-probabilities on every path.

{one process, one process with preemption, 1P1D, 2P2D with a migration in mid-stream} × features.
"""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.sampling import StructuredOutput
from pagewire.text.tokenizer import Tokenizer
from tests.decode_svc.harness import make_engine
from tests.matrix.features import ALLOWED, FEATURES, PROMPT, STOPS, check_equal, text_of, work_of
from tests.matrix.system import Output, Result, in_one_process, system
from tests.tiny_models import EOS


def test_what_is_expected_has_the_features(expected: dict[str, Result], model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    for name, result in expected.items():
        params = FEATURES[name].params
        assert len(result.choices) == params.n
        assert len(result.prompt_logprobs) == (0 if params.prompt_logprobs is None else len(PROMPT) - 1)
        for output in result.choices.values():
            assert len(output.logprobs) == (0 if params.logprobs is None else len(output.token_ids)), name
            if params.structured_output is not None and not FEATURES[name].options.stop:
                check_structure(params.structured_output, output)
    assert set(expected["allowed_token_ids"].choice(0).token_ids) <= set(ALLOWED)
    ids = expected["bad_words_token_ids"].choice(0).token_ids
    assert 41 not in ids
    assert (42, 43) not in list(itertools.pairwise(ids))
    assert 42 in ids, "nothing to forbid"
    assert not re.search("the|e|q", expected["bad_words"].choice(0).text)
    stopped = expected["min_tokens with two EOS"].choice(0)
    assert (len(stopped.token_ids), stopped.token_ids[-1], stopped.finish) == (10, EOS, "STOP")
    special = expected["special tokens"].choice(0)
    assert "<bos>" in special.text
    assert "<bos>" not in text_of(tokenizer, special, skip_special_tokens=True)
    check_stops(expected)
    check_best_of(expected["best_of"], model)


def check_stops(expected: dict[str, Result]) -> None:
    hidden, shown = expected["stop"].choices.values(), expected["stop shown"].choice(0)
    assert any(choice.finish == "STOP" for choice in hidden)
    assert not any(stop in choice.text for choice in hidden for stop in STOPS)
    assert shown.finish == "STOP"
    assert len(shown.token_ids) > FEATURES["stop shown"].params.min_tokens
    assert shown.text.endswith(STOPS)
    beams = expected["beam_search regex logprobs"]
    assert any(choice.finish == "STOP" for choice in beams.choices.values())


def check_best_of(found: Result, model: Path) -> None:
    """Those of all that were drawn whose tokens are likeliest, by the engine's own numbers."""
    feature = FEATURES["best_of"]
    engine = make_engine(model)
    try:
        params = replace(feature.params, n=feature.best_of or 0, logprobs=0)
        drawn = in_one_process(engine, {"all": (PROMPT, params)})["all"].choices.values()
    finally:
        engine.close()
    best = sorted(drawn, key=lambda choice: -sum(entry[0] for entry in choice.logprobs) / len(choice.logprobs))
    assert [choice.token_ids for choice in best[:2]] == [choice.token_ids for choice in found.choices.values()]


def check_structure(structure: StructuredOutput, output: Output) -> None:
    """Complete outputs have the form; what was cut by its length could become one."""
    if output.finish != "STOP":
        assert output.finish == "LENGTH"
        return
    assert output.token_ids[-1] == EOS
    if structure.kind == "regex":
        assert re.fullmatch(structure.value, output.text)
    elif structure.kind == "choice":
        assert output.text in structure.choices
    elif structure.kind == "grammar":
        assert re.fullmatch(r"[0-9+*() ]+\.", output.text)
    else:
        value = json.loads(output.text)
        assert isinstance(value, dict)
        if structure.kind == "json_schema":
            assert value.keys() == {"id", "kind", "tags"}
            assert value["kind"] in ("wide", "narrow")
            assert isinstance(value["id"], int)
            assert all(len(tag) <= 4 for tag in value["tags"])


def test_together_with_preemption(expected: dict[str, Result], model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    engine = make_engine(model, num_blocks=26, max_model_len=96)
    try:
        alone = {name: feature for name, feature in FEATURES.items() if not feature.is_the_routers}
        found = in_one_process(engine, {name: work_of(feature, tokenizer) for name, feature in alone.items()})
        assert engine.scheduler.num_preemptions > 0, "the pool was too large to show anything"
    finally:
        engine.close()
    for name, result in found.items():
        check_equal(name, result, expected[name], with_text=False)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "migrates"), [pytest.param(1, 1, False, marks=pytest.mark.nightly), (2, 2, True)]
)
async def test_through_services(
    expected: dict[str, Result], model: Path, num_prefill: int, num_decode: int, migrates: bool
) -> None:
    async with system(model, num_prefill=num_prefill, num_decode=num_decode) as running:
        for name, feature in FEATURES.items():
            before = running.num_migrations
            break_after = 3 * (feature.best_of or feature.params.n)
            found = await running.generate(feature.call(), break_after=break_after if migrates else None)
            check_equal(name, found, expected[name])
            # A step of a beam search is over too soon; test_beams.py and test_processes.py have its migrations.
            if migrates and feature.beam_search is None:
                assert running.num_migrations > before, f"{name}: nothing has migrated"

"""Any two features work together or are refused by name; the table in docs/generation.md says which."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams, StructuredOutput
from router.combinations import FEATURES, FIELDS, REFUSED
from router.request import BeamSearch, GenerateCall, TextOptions, TokenPrompt
from tests.matrix.system import system

DOC = Path(__file__).parents[2] / "docs" / "generation.md"
BASE = GenerateCall(TokenPrompt(tuple(range(20, 33))), SamplingParams(max_tokens=4, seed=1))


def sampling(**fields: object) -> Callable[[GenerateCall], GenerateCall]:
    return lambda call: replace(call, sampling=replace(call.sampling, **fields))  # type: ignore[arg-type]


SET: dict[str, Callable[[GenerateCall], GenerateCall]] = {
    "n > 1": sampling(n=2),
    "best_of": lambda call: replace(call, best_of=3),
    "beam_search": lambda call: replace(call, beam_search=BeamSearch(2)),
    "logprobs": sampling(logprobs=1),
    "prompt_logprobs": sampling(prompt_logprobs=1),
    "structured_output": sampling(structured_output=StructuredOutput("regex", "[a-z]{2,9}")),
    "allowed_token_ids": sampling(allowed_token_ids=tuple(range(40, 60))),
    "bad_words": lambda call: replace(call, text_options=replace(call.text_options, bad_words=("x", "the"))),
    "logit_bias": sampling(logit_bias={50: 3.0}),
    "penalties": sampling(repetition_penalty=1.2),
    "min_tokens": sampling(min_tokens=2),
    "ignore_eos": sampling(ignore_eos=True),
    "stop": lambda call: replace(call, text_options=replace(call.text_options, stop=("q",))),
    "stop_token_ids": sampling(stop_token_ids=(51,)),
    "truncate_prompt_tokens": lambda call: replace(call, truncate_prompt_tokens=5),
}


def table() -> str:
    """As it stands in the documentation."""
    names = list(FEATURES)
    lines = ["| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for row, name in enumerate(names):
        cells = ["no" if frozenset({name, other}) in REFUSED else "yes" for other in names[:row]]
        lines.append(f"| {row + 1} {name} | " + " | ".join([*cells, "·", *[""] * (len(names) - row - 1)]) + " |")
    return "\n".join(lines)


def test_the_documentation_has_this_table() -> None:
    assert table() in DOC.read_text(encoding="utf-8")


def test_each_setting_sets_its_feature_alone() -> None:
    assert SET.keys() == FEATURES.keys()
    assert BASE.text_options == TextOptions()
    for name, change in SET.items():
        assert [other for other, is_set in FEATURES.items() if is_set(change(BASE))] == [name]


async def test_every_pair(tiny_model: Callable[..., Path]) -> None:
    async with system(tiny_model("llama"), num_prefill=1, num_decode=1) as running:
        for one, other in combinations(FEATURES, 2):
            call = SET[other](SET[one](BASE))
            pair = frozenset({one, other})
            if pair in REFUSED:
                named = REFUSED[pair]
                (rest,) = pair - {named}
                with pytest.raises(InvalidArgument) as refused:
                    await running.generate(call)
                assert refused.value.message.startswith(FIELDS.get(named, f"sampling.{named}")), (one, other)
                assert refused.value.message.endswith(f"together with {rest}"), (one, other)
                continue
            result = await running.generate(call)
            assert len(result.choices) == call.sampling.n, (one, other)
            assert all(choice.finish in ("STOP", "LENGTH") for choice in result.choices.values()), (one, other)

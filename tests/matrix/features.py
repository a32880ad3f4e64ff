"""The features of generation that have to be the same on every path, and how results are compared."""

import json
from dataclasses import dataclass, field, replace

from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.text.tokenizer import Tokenizer
from router.request import BeamSearch, GenerateCall, TextOptions, TokenPrompt
from tests.matrix.system import Output, Result
from tests.tiny_models import EOS

NUM_TOKENS = 20
PROMPT = [(7 * i) % 250 + 10 for i in range(21)]
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "kind": {"enum": ["wide", "narrow"]},
                   "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}},
    "required": ["id", "kind", "tags"], "additionalProperties": False,
}  # fmt: skip
REGEX = r"([a-z]{2,4}-[0-9]{1,3};){4,8}\."
GRAMMAR = 'start: term (" + " term)+ "."\nterm: /[0-9]{1,4}/ | "(" term " * " term ")"'


@dataclass(frozen=True)
class Feature:
    """`params` goes to workers as it is; `options` and `truncate` are the router's part of the request."""

    params: SamplingParams
    options: TextOptions = field(default_factory=TextOptions)
    truncate: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None

    @property
    def is_the_routers(self) -> bool:
        """An engine alone does not have it."""
        return bool(self.options.stop or self.best_of or self.beam_search)

    def call(self) -> GenerateCall:
        return GenerateCall(
            TokenPrompt(tuple(PROMPT)),
            self.params,
            self.options,
            truncate_prompt_tokens=self.truncate,
            best_of=self.best_of,
            beam_search=self.beam_search,
        )


def free(**fields: object) -> SamplingParams:
    """Random, and not ended by EOS unless said otherwise."""
    return replace(SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=11), **fields)  # type: ignore[arg-type]


def structured(kind: str, value: str = "", choices: tuple[str, ...] = (), **fields: object) -> SamplingParams:
    structure = StructuredOutput(kind, value, choices)  # type: ignore[arg-type]
    return free(ignore_eos=False, structured_output=structure, max_tokens=48, **fields)


ALLOWED = tuple(range(40, 60))
STOPS = ("4\x05", "!", "\x17")  # over two tokens, one token, one before min_tokens
FEATURES: dict[str, Feature] = {
    "greedy": Feature(free(temperature=0.0)),
    "n": Feature(free(n=3, seed=5)),
    "logprobs": Feature(free(logprobs=3)),
    "prompt_logprobs": Feature(free(prompt_logprobs=2, logprobs=1)),
    "prompt_logprobs n": Feature(free(prompt_logprobs=0, n=2)),
    "allowed_token_ids": Feature(free(allowed_token_ids=ALLOWED)),
    "bad_words_token_ids": Feature(
        free(allowed_token_ids=(41, 42, 43, 44, 45), bad_words_token_ids=((41,), (42, 43), (44, 45)), temperature=4.0,
             logit_bias={42: 30.0, 43: 30.0})
    ),
    "bad_words": Feature(free(temperature=1.5), TextOptions(bad_words=("e", "the", "q"))),
    "min_tokens with two EOS": Feature(
        free(ignore_eos=False, min_tokens=9, stop_token_ids=(70,), logit_bias={EOS: 60.0, 70: 50.0})
    ),
    "stop_token_ids": Feature(free(stop_token_ids=tuple(range(100, 180)), min_tokens=8)),
    "penalties": Feature(free(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)),
    "truncate_prompt_tokens": Feature(free(), truncate=9),
    "special tokens": Feature(
        free(logit_bias={1: 30.0}, temperature=4.0), TextOptions(skip_special_tokens=False)
    ),
    "json_schema": Feature(structured("json_schema", json.dumps(SCHEMA))),
    "json_schema n logprobs": Feature(structured("json_schema", json.dumps(SCHEMA), n=2, logprobs=2)),
    "json_object": Feature(structured("json_object")),
    "regex": Feature(structured("regex", REGEX, temperature=1.4)),
    "regex greedy": Feature(structured("regex", REGEX, temperature=0.0, top_k=3)),
    "grammar": Feature(structured("grammar", GRAMMAR)),
    "choice": Feature(
        structured("choice", choices=("a rather long answer, chosen", "another answer that is long", "qq, rr and ss")),
    ),
    "regex stop prompt_logprobs": Feature(
        structured("regex", REGEX, prompt_logprobs=1, n=2, repetition_penalty=1.1)
    ),
    "stop": Feature(free(n=2, logprobs=0), TextOptions(stop=STOPS)),
    "stop shown": Feature(free(min_tokens=6), TextOptions(stop=STOPS, include_stop_str_in_output=True)),
    "best_of": Feature(free(n=2, prompt_logprobs=1), best_of=4),
    "beam_search": Feature(free(n=2, seed=1), beam_search=BeamSearch(3, length_penalty=0.7)),
    "beam_search regex logprobs": Feature(
        replace(structured("regex", REGEX, n=2, logprobs=2, prompt_logprobs=1), max_tokens=12),
        TextOptions(stop=("x-6", "l-")), beam_search=BeamSearch(3),
    ),
}  # fmt: skip


def work_of(feature: Feature, tokenizer: Tokenizer) -> tuple[list[int], SamplingParams]:
    """What the engine has to run for it: written anew here, not taken from the router."""
    words: list[tuple[int, ...]] = []
    for word in feature.options.bad_words:
        for text in (word, " " + word):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids not in words:
                words.append(ids)
    prompt = PROMPT if feature.truncate is None else PROMPT[-feature.truncate :]
    given = feature.params.bad_words_token_ids
    return prompt, replace(feature.params, bad_words_token_ids=(*given, *words))


def text_of(tokenizer: Tokenizer, output: Output, *, skip_special_tokens: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    token_ids = output.token_ids[:-1] if output.finish == "STOP" else output.token_ids
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def check_equal(name: str, found: Result, expected: Result, *, with_text: bool = True) -> None:
    assert found.prompt_logprobs == expected.prompt_logprobs, name
    assert found.choices.keys() == expected.choices.keys(), name
    for number, output in found.choices.items():
        wanted = expected.choices[number]
        assert output.token_ids == wanted.token_ids, (name, number)
        assert output.finish == wanted.finish, (name, number)
        assert output.logprobs == wanted.logprobs, (name, number)
        if with_text:
            assert output.text == wanted.text, (name, number)

"""Speculative decoding: what is guessed, when, and that no token ever depends on it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.prompt_lookup import NgramProposer
from engine.request import EngineRequest, TokenOutput
from engine.sequence import Sequence
from engine.speculation import MADE, Allowance, Speculator
from kernels import cpu
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.speculative import SpeculativeConfig
from tests.engine.model_harness import random_prompt

CONFIG = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "least_acceptance": 0}'


def sequence(token_ids: list[int], num_prompt_tokens: int = 1) -> Sequence:
    request = EngineRequest("r", tuple(token_ids[:num_prompt_tokens]), SamplingParams())
    return Sequence(request, 1, 0, token_ids, choices_to_sample=(0,))


@pytest.mark.parametrize(
    ("token_ids", "most", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, (4, 9)),
        ([1, 2, 3, 4, 9, 1, 2, 3], 9, (4, 9, 1, 2, 3, 4, 9, 1, 2)),  # on with the period
        ([7, 7, 7], 4, (7, 7, 7, 7)),
        ([1, 2, 5, 8, 2, 6, 1, 2], 1, (5,)),  # the longer match wins ...
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, (6,)),  # ... and of equals the latest
        ([1, 2, 3, 4], 4, ()),
        ([1, 2, 3, 9, 3], 4, ()),  # a match of one is too short
        ([5], 4, ()),
    ],
)
def test_ngram(token_ids: list[int], most: int, drafts: tuple[int, ...]) -> None:
    assert NgramProposer(2, 4).propose(sequence(token_ids), lambda *_: most) == drafts


def test_the_length_of_a_match_is_the_kind_of_its_drafts() -> None:
    kinds = []
    for token_ids in ([1, 2, 3, 4, 9, 1, 2, 3], [1, 2, 5, 9, 1, 2], [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]):
        NgramProposer(2, 4).propose(sequence(token_ids), lambda kind, _: kinds.append(kind) or 1)  # type: ignore[func-returns-value]
    assert kinds == [3, 2, 4]


def test_ngram_follows_a_growing_sequence() -> None:
    seq, proposer = sequence([1, 2]), NgramProposer(2, 3)
    for _ in range(400):
        fresh = NgramProposer(2, 3).propose(sequence(list(seq.token_ids)), lambda *_: 3)
        assert proposer.propose(seq, lambda *_: 3) == fresh
        seq.token_ids.append((seq.token_ids[-1] * 7 + 3) % 13)


class Guesses:
    """As many drafts as are worth it, all of one kind."""

    def __init__(self, kind: int = MADE, num_to_catch_up: int = 0) -> None:
        self.kind, self.num_to_catch_up = kind, num_to_catch_up

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        return (5,) * allowance(self.kind, self.num_to_catch_up)


def speculate(speculator: Speculator, seq: Sequence, num_steps: int, *, right: bool, most: int = 8) -> list[int]:
    """The number of drafts in each step; all come true, or none."""
    lengths = []
    for _ in range(num_steps):
        drafts = speculator.propose(seq, most, 1)
        lengths.append(len(drafts))
        if drafts:
            speculator.learn(seq, len(drafts), len(drafts) * right)
    return lengths


def test_it_pauses_where_it_does_not_pay_and_longer_each_time() -> None:
    config = SpeculativeConfig(num_speculative_tokens=4, pause_steps=3, least_acceptance=0.25)
    speculator, seq = Speculator(config, Guesses(kind=2)), sequence([1])
    lengths = speculate(speculator, seq, 40, right=False)
    tries = [step for step, length in enumerate(lengths) if length]
    assert lengths[0] == 2, "0.6 ** 2 > 0.25"
    assert sum(lengths) <= 8
    pauses = [later - earlier for earlier, later in pairwise(tries) if later - earlier > 1]
    assert pauses[:3] == [3, 6, 12]
    while not speculator.propose(seq, 8, 1):
        pass
    speculator.learn(seq, 1, 1)
    assert speculate(speculator, seq, 8, right=True)[-1] == 4, "and back to full length where it pays again"


@pytest.mark.parametrize(
    ("cost", "config", "goes_on"),
    [(0.0, {}, True), (0.4, {}, False), (0.4, {"least_acceptance": 0.25}, True), (7.0, {}, False)],
)
def test_drafts_that_cost_more_have_to_come_true_oftener(cost: float, config: dict[str, float], goes_on: bool) -> None:
    """A draft comes true with a likelihood of a third."""
    speculator, seq = Speculator(SpeculativeConfig(**config), Guesses(), cost=cost), sequence([1])  # type: ignore[arg-type]
    speculator.propose(seq, 8, 1)
    for step in range(30):
        speculator.learn(seq, 2, step % 2)
    assert bool(speculator.propose(seq, 8, 1)) == goes_on


def test_what_is_useless_takes_a_small_share_of_all_steps() -> None:
    """However many sequences come: the first ones learn for those after them."""
    speculator, num_steps, num_drafts = Speculator(SpeculativeConfig(), Guesses(), cost=0.5), 0, 0
    for _ in range(100):
        num_drafts += sum(speculate(speculator, sequence([1]), 60, right=False))
        num_steps += 60
    assert 20 < num_drafts * (0.5 + 0.05) < 0.01 * num_steps + 4


def test_what_is_to_be_read_first_counts_as_cost() -> None:
    """Half of a token's time for 200 tokens' reading, at a twentieth each: as much as five steps.

    They pay if the first 256 drafts come true as often as hoped; then there are risks.
    """
    speculator = Speculator(SpeculativeConfig(), Guesses(num_to_catch_up=200), cost=0.5)
    lengths = [sum(speculate(speculator, sequence([1]), 60, right=False)) for _ in range(30)]
    assert 1 <= lengths[0] <= 2, "the first tries"
    assert 2 <= sum(lengths[1:]) <= 5


def test_kinds_are_judged_apart() -> None:
    guesses = Guesses(kind=2)
    speculator, seq = Speculator(SpeculativeConfig(), guesses), sequence([1])
    speculate(speculator, seq, 20, right=False)
    assert sum(speculate(speculator, seq, 10, right=False)) <= 3, "one draft at a time, at intervals"
    guesses.kind = 5
    assert speculate(speculator, seq, 6, right=True)[-1] == 4
    guesses.kind = 2
    assert sum(speculate(speculator, seq, 3, right=False)) <= 1


def test_none_in_large_batches() -> None:
    speculator = Speculator(SpeculativeConfig(disable_by_batch_size=3), Guesses())
    assert speculator.propose(sequence([1]), 8, 3)
    assert not speculator.propose(sequence([1]), 8, 4)
    assert not speculator.propose(sequence([1]), 0, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "JSON"),
        ('{"method": "eagle"}', "method"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens: Input should be greater than or equal to 1"),
        ('{"prompt_lookup_min": 6, "prompt_lookup_max": 5}', "prompt_lookup_min (6) must be at most"),
        ('{"modle": "x"}', "modle"),
        ('{"method": "draft_model"}', "method draft_model needs a model"),
        ('{"method": "ngram", "model": "x"}', "model is for method draft_model, not for ngram"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "prompt_lookup_max is for method ngram, not for suffix"),
        ('{"model": "x", "prompt_lookup_min": 1}', "prompt_lookup_min is for method ngram and suffix, not for draft_"),
        ('{"model": "x", "prompt_lookup_max": 3}', "prompt_lookup_max is for method ngram, not for draft_model"),
        (
            '{"model": "x", "max_catch_up_tokens": 1}',
            "max_catch_up_tokens: Input should be greater than or equal to 16",
        ),
        ('{"model": "x", "quantization": "int3"}', "quantization: Input should be 'none', 'int8' or 'w8a8'"),
    ],
)
def test_a_bad_config_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match="speculative_config") as error:
        EngineOptions(model="x", speculative_config=text)
    assert problem in str(error.value)


def test_a_config_may_be_a_dict() -> None:
    """As in a TOML file, or in `LLM(..., speculative_config={...})`."""
    options = EngineOptions(model="x", speculative_config={"model": "y", "num_speculative_tokens": 2})  # type: ignore[arg-type]
    assert options.speculative_config is not None
    parsed = SpeculativeConfig.parse(options.speculative_config)
    assert (parsed.method, parsed.model, parsed.num_speculative_tokens) == ("draft_model", "y", 2)


def run(engine: Engine, requests: list[EngineRequest]) -> tuple[list[TokenOutput], list[tuple[int, int]], int]:
    """All tokens in order of request, choice and index; (drafted, accepted) of each step; the number of steps."""
    tokens, drafts, num_steps = [], [], 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        output = engine.step()
        assert not output.failed
        tokens += output.tokens
        drafts += output.drafts
        num_steps += 1
        engine.scheduler.check_integrity()
    engine.kv_cache.take_events()
    return sorted(tokens, key=lambda token: (token.request_id, token.choice, token.index)), drafts, num_steps


FEW = dict.fromkeys((40, 50, 60), 30.0)
"""Tokens that a random model would not leave again: its text repeats itself, as people's code does."""

FORM = StructuredOutput("json_schema", '{"type":"object","properties":{"kinds":{"type":"array","items":'
                        '{"enum":["green","grey"]},"minItems":3,"maxItems":5}},"required":["kinds"]}')  # fmt: skip

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2, logit_bias=FEW),
    "cold": SamplingParams(temperature=0.05, seed=5, max_tokens=60, ignore_eos=True, logprobs=0, logit_bias=FEW),
    "penalties": SamplingParams(
        temperature=0.3,
        seed=6,
        max_tokens=50,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        top_p=0.9,
        ignore_eos=True,
    ),
    "choices": SamplingParams(n=3, temperature=0.1, seed=7, max_tokens=40, ignore_eos=True),
    "stops": SamplingParams(temperature=0.0, max_tokens=60, min_tokens=9, stop_token_ids=tuple(range(20, 90, 3))),
    "grammar": SamplingParams(temperature=0.0, max_tokens=60, structured_output=FORM, logprobs=1),
    "sampled grammar": SamplingParams(n=2, seed=8, max_tokens=60, structured_output=FORM),
    "few": SamplingParams(
        seed=9, max_tokens=40, ignore_eos=True, allowed_token_ids=(40, 41, 50), bad_words_token_ids=((40, 41), (50, 50))
    ),
}


@pytest.mark.parametrize(
    ("kernels", "dtype", "block_size"),
    [
        ("native", "bfloat16", 4),
        ("native", "bfloat16", 16),
        ("reference", "float32", 4),
        ("torch", "bfloat16", 16),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in
          (("reference", "float32", 16), ("torch", "bfloat16", 4))),
    ],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_without_speculation(
    tiny_model: Callable[..., Path], kernels: str, dtype: str, block_size: int
) -> None:
    """Bit for bit, in a batch of everything, with a pool so small that sequences are preempted."""
    if kernels == "native" and not cpu.available():
        pytest.skip("no native kernels")
    options = EngineOptions(
        model=str(tiny_model("llama")), kernels=kernels, dtype=dtype, block_size=block_size, max_num_seqs=5,
        max_num_batched_tokens=24, max_model_len=160, cpu_threads=1, kv_cache_memory_bytes=260 * _token_bytes(dtype),
    )  # fmt: skip
    requests = [
        EngineRequest(name, tuple(2 * random_prompt(9 + 2 * i, seed=i).tolist()), params)
        for i, (name, params) in enumerate(PARAMS.items())
    ]
    plain, speculative = Engine(options), Engine(options.model_copy(update={"speculative_config": CONFIG}))
    try:
        expected, no_drafts, num_steps = run(plain, requests)
        tokens, drafts, num_fewer_steps = run(speculative, requests)
    finally:
        plain.close()
        speculative.close()
    assert tokens == expected
    assert not no_drafts
    num_accepted = sum(accepted for _, accepted in drafts)
    assert 20 < num_accepted < sum(drafted for drafted, _ in drafts), "some are right and some are wrong"
    assert num_fewer_steps < num_steps


def test_the_second_request_is_guessed_from_the_first_ones_output(tiny_model: Callable[..., Path]) -> None:
    """And from no other tenant's; the tokens are the same in any case."""
    options = EngineOptions(
        model=str(tiny_model("llama")), kernels="torch", block_size=4, max_model_len=160, cpu_threads=1,
        kv_cache_memory_bytes=400 * _token_bytes("float32"), enable_prefix_caching=False,
        speculative_config='{"method": "suffix", "least_acceptance": 0, "prompt_lookup_min": 6}',
    )  # fmt: skip
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    prompt = tuple(random_prompt(12, seed=1).tolist())
    engine, found = Engine(options), []
    try:
        for number, salt in enumerate(("a", "b", "a")):
            request = EngineRequest(str(number), prompt, params, cache_salt=salt)
            tokens, drafts, _ = run(engine, [request])
            found.append(([token.token_id for token in tokens], sum(accepted for _, accepted in drafts)))
    finally:
        engine.close()
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == found[1][1]
    assert found[2][1] > found[0][1] + 15


def _token_bytes(dtype: str) -> int:
    """KV of one token of the tiny Llama."""
    return 2 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)

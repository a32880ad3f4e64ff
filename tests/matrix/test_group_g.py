"""Rows of group G in CASES.md that other tests do not bear in their names, on 1P1D of a model with two EOS tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer
from router.request import GenerateCall, Piece, PromptLogprobs, Summary, TextOptions, TokenPrompt
from tests.decode_svc.harness import cluster, greedy, make_engine, random_prompt, reference
from tests.matrix.system import Result, System, in_one_process, result_of, system

EOS = (2, 60)
PROMPT = random_prompt(18, 5)
FREE = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", eos_token_id=list(EOS))


@pytest_asyncio.fixture
async def running(model: Path) -> AsyncIterator[System]:
    async with system(model, num_prefill=1, num_decode=1) as running:
        yield running


def call(params: SamplingParams, prompt: list[int] = PROMPT, **more: Any) -> GenerateCall:
    return GenerateCall(TokenPrompt(tuple(prompt)), params, **more)


def alone(model: Path, params: SamplingParams, prompt: list[int] = PROMPT, **options: Any) -> Result:
    """In one process."""
    engine = make_engine(model, enable_prefix_caching=False, **options)
    try:
        return in_one_process(engine, {"it": (prompt, params)})["it"]
    finally:
        engine.close()


async def summary_of(running: System, params: SamplingParams, prompt: list[int]) -> Summary:
    outputs = [output async for output in running.pipeline.generate(call(params, prompt))]
    assert isinstance(outputs[-1], Summary)
    return outputs[-1]


async def test_g2_stop_strings_with_token_ids_alone(running: System, model: Path) -> None:
    """Who sends and reads nothing but token ids has stop strings too: no token comes behind the one that ends it."""
    free = await running.generate(call(FREE))
    detokenizer = Tokenizer.load(model).detokenizer(skip_special_tokens=True)
    texts = [detokenizer.push(token_id) for token_id in free.choice(0).token_ids]
    at, stop = next(
        (i, text[-1]) for i, text in enumerate(texts) if i > 2 and text and text[-1] not in "".join(texts[:i])
    )
    found = (await running.generate(call(FREE, text_options=TextOptions(stop=(stop,))))).choice(0)
    assert (found.token_ids, found.finish) == (free.choice(0).token_ids[: at + 1], "STOP")


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 100])
async def test_g6_g7_min_tokens_with_two_eos(running: System, min_tokens: int) -> None:
    """Both are always the likeliest; exactly so many other tokens come before, whoever samples them."""
    biased = SamplingParams(
        max_tokens=120, min_tokens=min_tokens, temperature=0.0, seed=1, logit_bias={EOS[0]: 100.0, EOS[1]: 99.0}
    )
    for params in (biased, replace(biased, logit_bias={EOS[1]: 100.0}), replace(biased, temperature=1.0)):
        found = (await running.generate(call(params))).choice(0)
        assert [i for i, token_id in enumerate(found.token_ids) if token_id in EOS] == [min_tokens]
        assert (len(found.token_ids), found.finish) == (min_tokens + 1, "STOP")


async def test_g8_max_tokens_left_out(running: System) -> None:
    """It is what fits, on decode as on prefill, and not 0 or 1."""
    found = (await running.generate(call(SamplingParams(temperature=0.0, ignore_eos=True, seed=1)))).choice(0)
    assert len(found.token_ids) == running.pipeline.max_model_len - len(PROMPT)
    assert found.finish == "LENGTH"


async def test_g10_prompt_logprobs_come_from_prefill(running: System, model: Path) -> None:
    params = replace(FREE, prompt_logprobs=1, logprobs=1, n=2)
    outputs = [output async for output in running.pipeline.generate(call(params))]
    first = next(i for i, output in enumerate(outputs) if isinstance(output, Piece))
    assert [i for i, output in enumerate(outputs) if isinstance(output, PromptLogprobs)] == [*range(1, first)]
    assert (await result_of(running.pipeline, call(params))).prompt_logprobs == alone(model, params).prompt_logprobs


@pytest.mark.parametrize("n", [1, 3])
async def test_g12_cached_tokens_are_prefills_hits(running: System, n: int) -> None:
    """Counted once, however many choices share them."""
    prompt, other = random_prompt(21, 40 + n), random_prompt(30, 60 + n)
    params = replace(FREE, n=n)
    assert (await summary_of(running, params, prompt)).cached_tokens == 0
    warm = await summary_of(running, params, prompt)
    assert (warm.cached_tokens, warm.prompt_tokens, warm.completion_tokens) == (20, 21, 12 * n)
    assert (await summary_of(running, params, [*prompt[:9], *other])).cached_tokens == 8


async def test_g13_a_seed_decides_everywhere(running: System, model: Path) -> None:
    """Alone, in a batch, twice at once, after a preemption, in one process and apart; n = 3 distinct and repeatable."""
    params = replace(FREE, n=3, max_tokens=20)
    wanted = alone(model, params)
    assert len({tuple(choice.token_ids) for choice in wanted.choices.values()}) == 3
    others = [call(replace(FREE, seed=seed), random_prompt(9 + seed, seed)) for seed in range(4)]
    batch = await asyncio.gather(*(running.generate(each) for each in (call(params), *others, call(params))))
    assert batch[0].choices == batch[-1].choices
    for found in (batch[0], await running.generate(call(params))):
        assert {n: choice.token_ids for n, choice in found.choices.items()} == {
            n: choice.token_ids for n, choice in wanted.choices.items()
        }
    # A pool that cannot hold them all.
    engine = make_engine(model, num_blocks=20, max_model_len=64, enable_prefix_caching=False)
    try:
        work = {"it": (PROMPT, params), "more": (random_prompt(20, 2), params), "most": (random_prompt(17, 3), params)}
        assert in_one_process(engine, work)["it"] == wanted
        assert engine.scheduler.num_preemptions > 0
    finally:
        engine.close()


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm"])
async def test_g15_kv_that_is_larger_than_a_message(tiny_model: Callable[..., Path], plane: str) -> None:
    """More than gRPC's 4 MiB goes over in pieces."""
    wide = tiny_model("llama", num_hidden_layers=2, num_key_value_heads=4, head_dim=512)
    prompt, params = random_prompt(150, 8), greedy(5)
    options = {"num_blocks": 48, "max_num_batched_tokens": 64}
    async with cluster(wide, plane=plane, prefill_options=options, decode_options=options) as both:
        num_bytes = both.prefill_engine.memory.layout.block_bytes * (len(prompt) // 4)
        assert num_bytes > 4 << 20
        assert [await both.run(prompt, params)] == reference(wide, [(prompt, params)], **options)
        assert both.value(both.decode, "pagewire:transfer_bytes_total") >= num_bytes


async def test_g18_ignore_eos_holds_for_both(running: System) -> None:
    for eos in EOS:
        biased = SamplingParams(max_tokens=6, temperature=0.0, seed=1, logit_bias={eos: 100.0})
        found = (await running.generate(call(replace(biased, ignore_eos=True)))).choice(0)
        assert (found.token_ids, found.finish) == ([eos] * 6, "LENGTH")
        assert (await running.generate(call(biased))).choice(0).token_ids == [eos]
        asked = replace(biased, ignore_eos=True, stop_token_ids=(eos,))
        assert (await running.generate(call(asked))).choice(0).token_ids == [eos]

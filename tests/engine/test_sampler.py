"""The sampler as a whole: greedy, seeds, choices, independence of rows, broken logits, against a plain oracle."""

from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from engine.sample import SampledToken, SampleRow
from engine.sampler import Sampler
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import expected, make_row, sample_one

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)


def _logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_likeliest_token_and_the_lowest_id_among_equals() -> None:
    assert sample_one([0.0, 3.0, 1.0, 3.0], GREEDY).token_id == 1
    assert sample_one([2.0] * 9, GREEDY).token_id == 0
    assert sample_one([-5.0, -np.inf, -4.0], GREEDY).token_id == 2


def test_greedy_does_not_depend_on_seed_position_or_choice() -> None:
    table = _logits(1)
    rows = [make_row(GREEDY, seed=s, position=p, choice=c) for s in (0, 9) for p in (1, 70) for c in (0, 3)]
    assert {token.token_id for token in Sampler(VOCAB).sample(table, rows)} == {int(table[0].argmax())}


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    table = _logits(1)
    assert sample_one(table[0], SamplingParams(temperature=1e-12)).token_id == int(table[0].argmax())


def test_top_k_1_is_greedy_at_any_temperature_even_among_equals() -> None:
    for position in range(50):
        assert sample_one([1.0, 7.0, 7.0], SamplingParams(temperature=5.0, top_k=1), position=position).token_id == 1


PARAMS = (
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.3, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(top_p=0.4, presence_penalty=-1.0, logit_bias=MappingProxyType({5: 4.0, 17: -100.0})),
)


def _mixed_rows(count: int) -> list[SampleRow]:
    return [
        make_row(
            PARAMS[i % len(PARAMS)],
            logits_row=i,
            seed=i // 3,
            position=20 + i,
            prompt_token_ids=tuple(range(i)),
            output_token_ids=(i, i, 2 * i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_row_gives_the_same_token_and_logprobs_alone_and_in_any_batch(vocab: int) -> None:
    table = _logits(16, vocab)
    rows = _mixed_rows(16)
    sampler = Sampler(vocab)
    together = sampler.sample(table, rows)
    alone = [sampler.sample(table[i : i + 1].clone(), [SampleRow(0, *_rest(row))])[0] for i, row in enumerate(rows)]
    assert alone == together  # exact, log-probabilities too
    assert sampler.sample(table, rows[::-1]) == together[::-1]
    # Not aligned to a SIMD register, as a view into a wider buffer is not.
    shifted = torch.empty(16 * vocab + 1)[1:].view(16, vocab).copy_(table)
    assert sampler.sample(shifted, rows) == together
    padded = torch.cat([table, torch.full((16, 7), 99.0)], dim=1)
    assert sampler.sample(padded, rows) == together


def _rest(row: SampleRow) -> tuple[object, ...]:
    return (
        row.params,
        row.seed,
        row.choice,
        row.position,
        row.prompt_token_ids,
        row.output_token_ids,
        row.suppressed_token_ids,
    )


def test_the_number_of_threads_changes_nothing() -> None:
    table, rows = _logits(8, 20000), _mixed_rows(8)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(Sampler(20000).sample(table, rows))
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_choices_of_one_row_are_distinct_and_repeatable() -> None:
    table = _logits(1, scale=0.5)
    rows = [make_row(choice=choice, seed=42) for choice in range(8)]
    sampler = Sampler(VOCAB)
    tokens = [token.token_id for token in sampler.sample(table, rows)]
    assert len(set(tokens)) > 4
    assert [token.token_id for token in sampler.sample(table, rows)] == tokens


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_seed_and_position_decide(seed: int) -> None:
    flat = np.zeros(4096)
    first = [sample_one(flat, seed=seed, position=position).token_id for position in range(20)]
    assert first == [sample_one(flat, seed=seed, position=position).token_id for position in range(20)]
    assert len(set(first)) > 15
    assert first != [sample_one(flat, seed=seed ^ 1, position=position).token_id for position in range(20)]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ([np.nan] * 4, "logits at position 10 are not finite"),
        ([1.0, np.nan, 2.0, 0.0], "logits at position 10 are not finite"),
        ([1.0, np.inf, 2.0, 0.0], "logits at position 10 are not finite"),
        ([-np.inf] * 4, "logits at position 10 are not finite"),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=2)])
def test_broken_logits_fail_their_own_row_only(broken: list[float], reason: str, params: SamplingParams) -> None:
    table = torch.tensor([[0.0, 1.0, 2.0, 3.0], broken, [9.0, 1.0, 2.0, 3.0]])
    rows = [make_row(GREEDY, logits_row=0), make_row(params, logits_row=1), make_row(GREEDY, logits_row=2)]
    first, failed, last = Sampler(4).sample(table, rows)
    assert (first, last) == (SampledToken(3), SampledToken(0))
    assert failed.token_id == -1
    assert failed.error is not None
    assert reason in failed.error
    assert not failed.field


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_nothing_left_to_draw_fails_the_row(params: SamplingParams) -> None:
    token = sample_one([1.0, 2.0], params, suppressed_token_ids=(0, 1))
    assert token.token_id == -1
    assert "no token with a finite logit is left" in str(token.error)
    assert token.field == "params.min_tokens", "it is the request's own fault, not the worker's"


UGLY = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 100.0), st.sampled_from([1e-30, 1e-5, 1.0, 2.0, 1e30])),
    top_p=st.one_of(st.floats(1e-9, 1.0), st.sampled_from([1e-30, 0.5, 0.999999, 1.0])),
    top_k=st.one_of(st.integers(0, 40), st.sampled_from([1, 2**31 - 1])),
    min_p=st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 1e-300, 1.0])),
    repetition_penalty=st.floats(0.25, 4.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(st.integers(0, 19), st.floats(-100.0, 100.0, width=32), max_size=4),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


@settings(max_examples=300, deadline=None)
@given(
    raw=st_numpy.arrays(
        np.float32,
        20,
        elements=st.one_of(
            st.sampled_from([-3.0, 0.0, 1.0, 2.0]),
            st.floats(-60.0, 60.0, width=32),
            st.sampled_from([-np.inf, 1e30, -1e30]),
        ),
    ),
    params=UGLY,
    output=st.lists(st.integers(0, 19), max_size=6),
    prompt=st.lists(st.integers(0, 19), max_size=6),
    suppressed=st.lists(st.integers(0, 19), max_size=3),
    key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 63)),
)
def test_any_parameters_give_what_the_oracle_gives(
    raw: np.ndarray, params: SamplingParams, output: list[int], prompt: list[int], suppressed: list[int], key: tuple
) -> None:
    assume(np.isfinite(np.delete(raw, suppressed)).any())  # else there is nothing to draw: the row fails, see above
    row = make_row(
        params,
        seed=key[0],
        position=key[1],
        choice=key[2],
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        suppressed_token_ids=tuple(suppressed),
    )
    found = Sampler(20).sample(torch.from_numpy(raw)[None], [row])[0]
    with np.errstate(all="ignore"):
        wanted = expected(raw, row)
    assert found.error is None
    assert 0 <= found.token_id < 20
    assert found.token_id not in suppressed
    if wanted.slack > 1e-5:  # else float32 and float64 may cut a filter at a different token
        assert found.token_id == wanted.token_id
        assert found.token_id in wanted.kept

"""Log-probabilities: the model's own, with rank and the likeliest tokens."""

from types import MappingProxyType

import numpy as np
import pytest
import torch

from engine.sampler import token_logprobs
from pagewire.sampling import SamplingParams
from tests.engine.sampler_oracle import sample_one

VOCAB = 70_000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 5 + 3
WANTED = torch.log_softmax(LOGITS.double(), dim=0)


@pytest.mark.parametrize("token_id", [0, 17, int(LOGITS.argmax()), int(LOGITS.argmin())])
def test_logprob_and_rank_equal_log_softmax(token_id: int) -> None:
    found = token_logprobs(LOGITS.numpy(), token_id, 0)
    assert found.logprob == pytest.approx(float(WANTED[token_id]), abs=2e-7)
    assert found.rank == int((WANTED[token_id] < WANTED).sum()) + 1
    assert found.top == ()


@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_likeliest_come_best_first_with_their_logprobs(count: int) -> None:
    found = token_logprobs(LOGITS.numpy(), 17, count)
    values, ids = torch.topk(WANTED, count)
    assert [token for token, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=2e-7)


def test_rank_agrees_with_the_order_of_the_likeliest_among_equals() -> None:
    raw = np.array([1.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    for token_id in range(5):
        found = token_logprobs(raw, token_id, 5)
        assert found.top[found.rank - 1] == (token_id, found.logprob)


def test_logprobs_are_of_the_model_not_of_what_sampling_made_of_it() -> None:
    params = SamplingParams(
        temperature=0.3,
        top_k=2,
        repetition_penalty=1.7,
        logit_bias=MappingProxyType({17: 100.0}),
        logprobs=3,
    )
    found = sample_one(LOGITS, params, output_token_ids=(3, 4), suppressed_token_ids=(int(LOGITS.argmax()),))
    assert found.token_id == 17
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(WANTED[17]), abs=2e-7)
    assert [token for token, _ in found.logprobs.top] == torch.topk(WANTED, 3).indices.tolist()


def test_no_logprobs_unless_asked_for() -> None:
    assert sample_one(LOGITS).logprobs is None
    asked = sample_one(LOGITS, SamplingParams(logprobs=0)).logprobs
    assert asked is not None
    assert asked.top == ()


def test_impossible_tokens_have_minus_infinity() -> None:
    raw = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    found = token_logprobs(raw, 0, 3)
    assert found.logprob == pytest.approx(np.log(0.5))
    assert found.top[2] == (1, -np.inf)


def test_the_likeliest_of_what_may_be_drawn() -> None:
    """Masks count, bias does not; values and the drawn token's rank stay the model's. Fewer, if fewer may be drawn."""
    best = [int(token_id) for token_id in torch.topk(LOGITS, 6).indices]
    allowed = np.ones(VOCAB, dtype=np.bool_)
    allowed[best[0]] = allowed[best[3]] = False
    bias = MappingProxyType({best[5]: 100.0})
    params = SamplingParams(temperature=0.0, logit_bias=bias, logprobs=3, drawable_logprobs=True)
    found = sample_one(LOGITS, params, allowed=allowed, suppressed_token_ids=(best[1], VOCAB + 5))
    assert found.token_id == best[5]
    assert found.logprobs is not None
    assert (found.logprobs.rank, found.logprobs.logprob) == (6, pytest.approx(float(WANTED[best[5]]), abs=2e-7))
    assert [token for token, _ in found.logprobs.top] == [best[2], best[4], best[5]]
    assert [value for _, value in found.logprobs.top] == pytest.approx(
        [float(WANTED[token]) for token in (best[2], best[4], best[5])], abs=2e-7
    )
    only = np.zeros(VOCAB, dtype=np.bool_)
    only[17] = True
    alone = sample_one(LOGITS, params, allowed=only).logprobs
    assert alone is not None
    assert [token for token, _ in alone.top] == [17]

"""Log-probabilities, ranks and top-N against the CPU's sampler, which sums in float64.

float32: an exp and a tree of sums to 2^-24 each, relative to a total whose logarithm is near 10: 4e-6 in all.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.sampler import token_logprobs
from kernels.triton import logprobs
from tests.kernels.triton.mutants import mutant
from tests.kernels.triton.tensors import random

TOLERANCE = 4e-6


def check(
    kernels: ModuleType, logits: Tensor, logits_rows: list[int], tokens: list[int], num_top: int, size: int
) -> None:
    found = kernels.log_probabilities(
        logits,
        logits_rows=torch.tensor(logits_rows, dtype=torch.int32),
        token_ids=torch.tensor(tokens),
        num_top=num_top,
        vocab_size=size,
    )
    for sample, (row, token) in enumerate(zip(logits_rows, tokens, strict=True)):
        wanted = token_logprobs(logits[row, :size].float().numpy(), token, num_top)
        assert abs(float(found.logprob[sample]) - wanted.logprob) < TOLERANCE
        assert int(found.rank[sample]) == wanted.rank
        assert found.top_ids[sample].tolist() == [top for top, _ in wanted.top]
        for value, (_, logprob) in zip(found.top_logprobs[sample].tolist(), wanted.top, strict=True):
            assert abs(value - logprob) < TOLERANCE


def tied(size: int) -> Tensor:
    """Logits in steps of 1/8, so that many are equal; padding that would win."""
    logits = (random(3, size + 9) * 16).round() / 8
    logits[:, size:] = 50.0
    return logits


@pytest.mark.parametrize("size", [1, 2, 300, 4096, 9001])
def test_against_the_cpu(size: int) -> None:
    for num_top in (0, 1, 5, 20):
        check(logprobs, tied(size), [0, 2, 2, 1], [0, size - 1, size // 2, size // 3], min(num_top, size), size)


def test_bfloat16_and_infinities() -> None:
    logits = (random(2, 9001) * 3).bfloat16()
    logits[0, 4096:8192] = -torch.inf  # a chunk without a finite logit
    check(logprobs, logits, [0, 1], [3, 5], 3, 9001)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(token < chosen)", "(token <= chosen)"),
        ("mask=inside, other=float", "mask=token < stride_logits, other=float"),
        ("tl.exp(chunk_peak - peak)", "1.0"),
        ("left = left & (token != winner)\n", "left = left & (token > winner)\n"),
        ("(left & (logit == best), token, _NO_TOKEN)", "(logit == best, token, _NO_TOKEN)"),
        ("best - log_total", "best - peak"),
    ],
)
def test_a_planted_bug_goes_red(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(mutant(logprobs, old, new, tmp_path), tied(9001), [0, 1], [17, 8000], 5, 9001)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random(3, 9001)
    tokens = torch.tensor([1, 5000, 9000])
    args = {"num_top": 4, "vocab_size": 9001}
    together = logprobs.log_probabilities(logits, logits_rows=torch.arange(3).int(), token_ids=tokens, **args)
    for row in range(3):
        place = torch.tensor([row], dtype=torch.int32)
        alone = logprobs.log_probabilities(logits, logits_rows=place, token_ids=tokens[row : row + 1], **args)
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[row])


def test_no_rows_and_what_does_not_fit() -> None:
    logits, none = random(1, 9), torch.empty(0, dtype=torch.int64)
    empty = logprobs.log_probabilities(logits, logits_rows=none.int(), token_ids=none, num_top=2, vocab_size=9)
    assert empty.top_ids.shape == (0, 2)
    with pytest.raises(ValueError, match="num_top 10 of at most 9"):
        logprobs.log_probabilities(logits, logits_rows=none.int(), token_ids=none, num_top=10, vocab_size=9)

"""Embedding and logits over a vocabulary that the ranks share out."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.parallel.group import RankGroup
from kernels.lora import Lora


def embed(
    kernels: ModelKernels,
    weight: Any,
    ids: Tensor,
    token_ids: range,
    scale: float | None,
    group: RankGroup,
    lora: Lora | None = None,
) -> Tensor:
    """Rows of the whole embedding; `token_ids` are those whose rows `weight`, and `lora`, have. ids [T] -> [T, H].

    One rank has each row and the others add zeros, so the sum is the row itself.
    """
    own = (ids >= token_ids.start) & (ids < token_ids.stop)
    rows = kernels.embedding((ids - token_ids.start).where(own, 0), weight, scale, lora=lora)
    return group.sum(rows.float().masked_fill_(~own[:, None], 0.0)).to(rows.dtype)


def gather_logits(logits: Tensor, width: int, vocab_size: int, group: RankGroup) -> Tensor | None:
    """The ranks' logits side by side, on rank 0 alone; none has more than `width`. [R, own] -> [R, vocab]."""
    parts = group.gather(F.pad(logits, (0, width - logits.shape[1])))
    return None if parts is None else parts.transpose(0, 1).reshape(len(logits), -1)[:, :vocab_size].contiguous()

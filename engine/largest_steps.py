"""Runs the steps that take the most device memory, so that somebody can measure it: on one block of KV that all share.

    prefill   max_num_batched_tokens new tokens in as few sequences as have room for them
    decode    max_num_seqs sequences of full length, with their drafts: attention's partial sums grow with the context

Each ends with logits and draws for max_num_seqs sequences and their drafts, penalties, filters and log-probabilities
included. What is computed is of no interest: the block is zeros, or what the others have written there.
"""

from dataclasses import dataclass, replace

import torch

from engine.memory import KvLayers, KvLayout, layer_views
from engine.models.decoder import Decoder
from engine.sample import SampleRow
from engine.sampler import RowSampler
from kernels.kv_cells import Cells
from kernels.paged import PagedBatch
from kernels.triton.step_batch import place
from kvstore.kv_groups import KvGroups
from pagewire.sampling import SamplingParams

_PARAMS = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Tokens and sequences of a step, tokens of a sequence, and drafts that each may bring along."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_drafts: int = 0

    @property
    def max_num_rows(self) -> int:
        """Of logits in a step."""
        return self.max_num_seqs * (1 + self.num_drafts)


class OneBlock:
    """`KvLayers` of a pool of one block."""

    def __init__(self, layout: KvLayout, groups: KvGroups, device: torch.device) -> None:
        block = torch.zeros(1, *layout.block_shape, dtype=layout.stored_dtype, device=device)
        self._layers, self.layer_groups = layer_views(block, layout, groups)

    def layer(self, index: int) -> tuple[Cells, Cells]:
        return self._layers[index]


def run_largest_steps(
    model: Decoder, sampler: RowSampler, layout: KvLayout, groups: KvGroups, limits: StepLimits
) -> None:
    """Returns when they were launched."""
    memory = OneBlock(layout, groups, model.kernels.device)
    for query_lens, kv_lens in _shapes(limits):
        num_blocks = [-(-length // layout.block_size) for length in kv_lens]
        tables = [[0] * count for count in num_blocks]
        paged = PagedBatch.build(query_lens, kv_lens, tables, layout.block_size)
        paged = replace(paged, others=(paged,) * (len(groups) - 1))
        _run(model, sampler, memory, paged, query_lens, limits.max_num_rows, fp8=layout.kv_format is not None)


def _shapes(limits: StepLimits) -> list[tuple[list[int], list[int]]]:
    """(new tokens, all tokens) of each sequence, of each step."""
    tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    chunks = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    per_sequence = min(1 + limits.num_drafts, longest)
    num_sequences = max(1, min(limits.max_num_seqs, tokens // per_sequence))
    return [(chunks, chunks), ([per_sequence] * num_sequences, [longest] * num_sequences)]


def _run(
    model: Decoder,
    sampler: RowSampler,
    memory: KvLayers,
    paged: PagedBatch,
    query_lens: list[int],
    max_num_rows: int,
    *,
    fp8: bool,
) -> None:
    config = model.config
    device, num_tokens = model.kernels.device, sum(query_lens)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    starts = [kv_len - query_len for query_len, kv_len in zip(query_lens, paged.kv_lens, strict=True)]
    positions = [start + i for start, length in zip(starts, query_lens, strict=True) for i in range(length)]
    batch = place(paged, group_size=config.group_size, head_dim=config.head_dim, device=device, fp8=fp8)
    hidden = model.forward(ids, torch.tensor(positions).to(device), batch, memory)
    num_rows = min(num_tokens, max_num_rows)
    logits = model.logits(hidden[:num_rows].contiguous())
    rows = [SampleRow(row, _PARAMS, row, 0, 1, (0,), (1,)) for row in range(num_rows)]
    sampler.sample(logits, rows)

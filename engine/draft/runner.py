"""Executes the draft model: one forward over all sequences of a step, and a guess for each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from engine.draft.drafter import DraftChunk
from engine.head_rows import HeadRows
from engine.memory import KvMemory
from engine.models.decoder import Decoder
from engine.sample import SampleRow
from engine.sample_row import row_of
from engine.sampler_choice import sampler_for
from kernels.paged import PagedBatch
from pagewire.grammar import GrammarError


class DraftRunner:
    """Draws as the served model's runner does, with the same parameters and noise: what is likely to be drawn there."""

    def __init__(
        self,
        model: Decoder,
        memory: KvMemory,
        eos_token_ids: tuple[int, ...],
        forward: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """`memory` has as many blocks as the pool; `eos_token_ids` are the served model's.

        `forward` runs in place of the model's own.
        """
        self._model = model
        self._forward = model.forward if forward is None else forward
        self._memory = memory
        self._eos_token_ids = eos_token_ids
        self._sampler = sampler_for(model.kernels, model.config.vocab_size)

    def run(self, chunks: Sequence[DraftChunk]) -> list[int | None]:
        """See `DraftModel`."""
        block_size = self._memory.layout.block_size
        query_lens = [chunk.end - chunk.start for chunk in chunks]
        batch = PagedBatch.build(
            query_lens,
            [chunk.end for chunk in chunks],
            [chunk.sequence.block_table[: -(-chunk.end // block_size)] for chunk in chunks],
            block_size,
        )
        input_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids], dtype=torch.int64)
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        hidden = self._forward(input_ids, positions, batch, self._memory)
        last_rows = [end - 1 for end, chunk in zip(accumulate(query_lens), chunks, strict=True) if chunk.sample]
        if not last_rows:
            return [None] * len(chunks)
        head = HeadRows(self._model, hidden[torch.tensor(last_rows)])
        sampling = [chunk for chunk in chunks if chunk.sample]
        rows = [
            row_of(chunk.sequence, row, chunk.sequence.choice, self._eos_token_ids, chunk.draft_token_ids)
            for row, chunk in enumerate(sampling)
        ]
        silent = [
            self._constrained(replace(row, params=replace(row.params, logprobs=None)), chunk)
            for row, chunk in zip(rows, sampling, strict=True)
        ]
        drawn = iter(self._sampler.sample_from(head, silent, ())[1])
        tokens = [next(drawn) if chunk.sample else None for chunk in chunks]
        return [None if token is None or token.error is not None else token.token_id for token in tokens]

    def _constrained(self, row: SampleRow, chunk: DraftChunk) -> SampleRow:
        """The row with what may be drawn if the drafts so far come true; no draft where a grammar can't say."""
        if not chunk.sequence.is_constrained:
            return row
        try:
            constraint = chunk.sequence.constrain(self._model.config.vocab_size)
            return replace(
                row, allowed=constraint.mask_of_guess(chunk.sequence.output_token_ids, chunk.draft_token_ids)
            )
        except GrammarError as error:
            return replace(row, error=str(error))

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()

"""A stand-in for the draft model: it keeps token ids where the KV would be, and checks what it sees there."""

from collections.abc import Sequence as Seq
from random import Random

import numpy as np

from engine.draft.drafter import DraftChunk
from tests.engine.fake_runner import VOCAB_SIZE, next_token, suppressed


class FakeDraftModel:
    """Guesses what the oracle will say, but for a mistake here and there; at times it draws nothing."""

    def __init__(
        self, num_blocks: int, block_size: int, rng: Random, *, max_catch_up_tokens: int, mistakes: float | None = None
    ) -> None:
        self.slots = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.runs: list[list[tuple[str, int, int, bool]]] = []
        self.fail_next = False
        self._rng = rng
        self._most = max_catch_up_tokens
        self._mistakes = rng.choice([0.0, 0.2, 0.6, 1.0]) if mistakes is None else mistakes

    def run(self, chunks: Seq[DraftChunk]) -> list[int | None]:
        if self.fail_next:
            raise RuntimeError("the draft model is broken")
        self.runs.append([(c.sequence.request_id, c.start, c.end, c.sample) for c in chunks])
        assert sum(length for c in chunks if (length := c.end - c.start) > 2) <= self._most, "too much at once"
        for chunk in chunks:
            self._write(chunk)
        return [self._draw(chunk) if chunk.sample else None for chunk in chunks]

    def close(self) -> None:
        self.slots = self.slots[:0]

    def _write(self, chunk: DraftChunk) -> None:
        table, size = chunk.sequence.block_table, self.slots.shape[1]
        for position, token_id in zip(range(chunk.start, chunk.end), chunk.token_ids, strict=True):
            self.slots[table[position // size], position % size] = token_id
        known = [*chunk.sequence.token_ids, *chunk.draft_token_ids][: chunk.end]
        assert self.slots[table].reshape(-1)[: chunk.end].tolist() == known, "KV of other tokens"

    def _draw(self, chunk: DraftChunk) -> int | None:
        sequence, params = chunk.sequence, chunk.sequence.params
        tokens = [*sequence.token_ids, *chunk.draft_token_ids]
        index = len(tokens) - sequence.num_prompt_tokens
        right = next_token(tokens, sequence.choice, suppressed(params.stop_token_ids, index, params.min_tokens))
        if self._rng.random() < self._mistakes:
            return self._rng.choice([None, (right + 1) % VOCAB_SIZE])
        return right

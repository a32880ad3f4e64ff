"""A fast, deterministic stand-in for the model: its next token depends on every token seen through the block table.

It stores token ids where the KV would be, by block and slot. A wrong block table, a missed copy on write, a block
reused too early or computed tokens that were not computed show up as wrong tokens. KV groups store theirs apart; what a
group's window shows is checked at each step, and where group 0 slides the oracle is told what lies before its window.
"""

import hashlib
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.sample import SampledToken
from engine.sequence import Schedule, ScheduledSequence, Sequence
from kvstore.kv_groups import RELEASED, KvGroups

VOCAB_SIZE = 97
EOS = 2
GROUP_OFFSET = 1000


def next_token(visible: Seq[int], choice: int, suppress: frozenset[int] = frozenset()) -> int:
    """The oracle: a hash of all tokens so far and of the choice."""
    data = struct.pack(f"<{len(visible) + 1}q", choice, *visible)
    token = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) % VOCAB_SIZE
    while token in suppress:
        token = (token + 1) % VOCAB_SIZE
    return token


def suppressed(params_stop: Seq[int], index: int, min_tokens: int) -> frozenset[int]:
    return frozenset({EOS, *params_stop}) if index < min_tokens else frozenset()


@dataclass
class FakeItem:
    """What a device gets of a scheduled sequence when the step is started. `token_ids`: all up to its last new one."""

    sequence: Sequence
    tables: list[list[int]]
    num_released: list[int]
    start: int
    token_ids: list[int]
    drafts: tuple[int, ...]
    sample: bool
    is_ahead: bool

    @staticmethod
    def of(item: ScheduledSequence) -> "FakeItem":
        seq, drafts = item.sequence, item.draft_token_ids
        known = [*seq.token_ids[: item.start + item.num_new_tokens - len(drafts)], *drafts]
        tables = [list(table) for table in seq.tables]
        return FakeItem(seq, tables, list(seq.num_released), item.start, known, drafts, item.sample, item.is_ahead)


class FakeStep:
    """A step that was started; the device may get to it late, when others have long changed their books."""

    def __init__(self, runner: "FakeRunner", schedule: Schedule, before: "FakeStep | None") -> None:
        self._runner = runner
        self._before = before
        self._copies = schedule.copies
        self._items = [FakeItem.of(item) for item in schedule.items]
        self._sampled: list[list[SampledToken]] | None = None

    def drawn(self, sequence: Sequence) -> int:
        """Its token."""
        results = zip(self._items, self.finish(), strict=True)
        return next(tokens[0].token_id for item, tokens in results if item.sequence is sequence)

    def finish(self) -> list[list[SampledToken]]:
        if self._sampled is None:
            for item in self._items:
                if item.is_ahead:
                    assert self._before is not None
                    item.token_ids.append(self._before.drawn(item.sequence))
            self._sampled = self._runner.run(self._copies, self._items)
        return self._sampled


class FakeRunner:
    """See the module's docstring. `steps` keeps (request, choice, tokens computed) of each step for assertions.

    A step that is started runs as late as it can, `runs_early`: as early.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: KvGroups | None = None) -> None:
        self.groups = KvGroups(block_size=block_size) if groups is None else groups
        self.slots = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.steps: list[list[tuple[str, int, int]]] = []
        self.num_copies = 0
        self.num_ahead = 0
        self.runs_early = False
        self.fail_next: str | None = None

    def execute(self, schedule: Schedule) -> list[list[SampledToken]]:
        return self.start(schedule).finish()

    def start(self, schedule: Schedule, before: FakeStep | None = None) -> FakeStep:
        if self.fail_next is not None:
            message, self.fail_next = self.fail_next, None
            raise RuntimeError(message)
        self.num_copies += len(schedule.copies)
        self.num_ahead += before is not None
        self.steps.append([(i.sequence.request_id, i.sequence.choice, i.num_new_tokens) for i in schedule.items])
        step = FakeStep(self, schedule, before)
        if self.runs_early:
            step.finish()
        return step

    def run(self, copies: Seq[tuple[int, int]], items: Seq[FakeItem]) -> list[list[SampledToken]]:
        """What the device does."""
        for source, destination in copies:
            self.slots[destination] = self.slots[source]
        for item in items:
            for group, table in enumerate(item.tables):
                for position in range(item.start, len(item.token_ids)):
                    block, slot = table[position // self.block_size], position % self.block_size
                    self.slots[block, slot] = item.token_ids[position] + group * GROUP_OFFSET
                if not self.groups.is_plain:
                    self._check_window(group, table, item.token_ids, item.start)
        return [self._sample_with_drafts(item) if item.sample else [] for item in items]

    def _sample_with_drafts(self, item: FakeItem) -> list[SampledToken]:
        end = len(item.token_ids) - len(item.drafts)
        tokens = self._sample(item, end)
        for i, draft in enumerate(item.drafts):
            if tokens[-1].token_id != draft:
                break
            tokens += self._sample(item, end + i + 1)
        return tokens

    def _check_window(self, group: int, table: Seq[int], known: Seq[int], start: int) -> None:
        """What the token at `start` and all behind it see is there, and theirs."""
        first = self.groups.groups[group].first_seen(start)
        blocks = list(table[first // self.block_size : -(-len(known) // self.block_size)])
        assert RELEASED not in blocks, "a block was given back too early"
        shown = self.slots[blocks].reshape(-1)[first % self.block_size :][: len(known) - first]
        assert list(shown - group * GROUP_OFFSET) == list(known[first:])

    def visible(self, block_table: Seq[int], num_tokens: int) -> list[int]:
        """The tokens whose KV the block table shows."""
        flat = self.slots[list(block_table)].reshape(-1)[:num_tokens]
        return [int(token) for token in flat]

    def _sample(self, item: FakeItem, num_tokens: int) -> list[SampledToken]:
        seq, first = item.sequence, item.num_released[0] if item.num_released else 0
        before = item.token_ids[: first * self.block_size]
        visible = before + self.visible(item.tables[0][first:], num_tokens - len(before))
        params = seq.params
        index = num_tokens - seq.num_prompt_tokens
        suppress = suppressed(params.stop_token_ids, index, params.min_tokens)
        return [SampledToken(next_token(visible, choice, suppress)) for choice in seq.choices_to_sample]

"""Executes one step on the device: block copies, forward, logits of the rows that sample, sampling."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.head_rows import HeadRows
from engine.kernel_set import with_kv_format
from engine.lora.slots import AdapterSlots
from engine.lora.step import LoraStep
from engine.memory import KvMemory
from engine.models.decoder import Model
from engine.sample import SampledToken, SampleRow
from engine.sample_row import constrained_row
from engine.sampler import RowSampler
from engine.sequence import Schedule, ScheduledSequence
from engine.sequence import Sequence as EngineSequence
from engine.transformers_config import ServedConfig
from kernels.paged import PagedBatch
from kernels.staging import to_device

PROMPT_LOGPROB_ROWS = 32
"""Prompt rows whose logits are made at a time: of a large vocabulary each is a megabyte."""


def set_cpu_threads(cpu_threads: int = 0) -> int:
    """Let torch use that many threads; 0 = as many as this process may run on. Returns the number."""
    threads = cpu_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


Place = Callable[[PagedBatch], Any]
"""Makes of a batch what a model's kernels take (`kernels.paged.StepBatch`)."""


def as_it_is(batch: PagedBatch) -> PagedBatch:
    """What kernels take that run where the batch was made."""
    return batch


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that ended when it was started."""

    schedule: Schedule
    sampled: list[list[SampledToken]]

    def finish(self) -> list[list[SampledToken]]:
        """One list per item of the schedule."""
        return self.sampled

    @property
    def drawn(self) -> Mapping[EngineSequence, int]:
        """The token of each sequence; of a row of which none could be drawn any one, since nobody will see the next."""
        items = zip(self.schedule.items, self.sampled, strict=True)
        return {item.sequence: max(0, tokens[0].token_id) for item, tokens in items if tokens}


class ModelRunner:
    """The model on its memory. Holds no state of requests: the scheduler decides, and commits what comes back."""

    def __init__(
        self,
        config: ServedConfig,
        model: Model,
        memory: KvMemory,
        sampler: RowSampler,
        slots: AdapterSlots | None = None,
        place: Place = as_it_is,
        forward: Callable[..., Tensor] | None = None,
    ) -> None:
        """`forward` runs in place of the model's own."""
        self.config = config
        self._place = place
        self._model = model
        self._forward = model.forward if forward is None else forward
        self._memory = memory
        self._sampler = sampler
        self._slots = slots
        self.numerics_class = with_kv_format(model.numerics_class, memory.layout.kv_format)

    def start(self, schedule: Schedule, before: StepDone | None = None) -> StepDone:
        """Computes the step; `before` is the one of which items that were planned ahead go on."""
        return StepDone(schedule, self.execute(schedule, {} if before is None else before.drawn))

    def execute(
        self, schedule: Schedule, drawn: Mapping[EngineSequence, int] = MappingProxyType({})
    ) -> list[list[SampledToken]]:
        """One list per item of the schedule: empty unless it samples, one token per choice to sample otherwise.

        After drafts: the tokens up to the first that differs from its draft, that one included. `drawn`: see
        `build_batch`.
        """
        for source, destination in schedule.copies:
            self._memory.copy_block(source, destination)
        if schedule.is_empty:
            return []
        batch = build_batch(schedule, self._memory.layout.block_size, drawn)
        slots = self._assign_slots(schedule)
        adapters = self._adapters(slots)
        ids, positions, logits_rows = self._on_device(batch.input_ids, batch.positions, batch.logits_rows)
        hidden = self._forward(ids, positions, self._place(batch.paged), self._memory, adapters)
        for item, first_row in zip(schedule.items, batch.first_rows, strict=True):
            if item.sequence.wants_prompt_logprobs:
                self._report_prompt(item, hidden, first_row, slots)
        if not batch.logits_rows.numel():
            return [[] for _ in schedule.items]
        sampling_rows = self._adapters([slots[row] for row in batch.logits_rows.tolist()] if slots else [])
        all_sample = len(logits_rows) == len(hidden)  # in order
        head = HeadRows(self._model, hidden if all_sample else hidden[logits_rows], sampling_rows)
        sampling = [item for item in schedule.items if item.sample]
        first_rows = [0, *accumulate(1 + len(item.draft_token_ids) for item in sampling)]
        rows = [
            constrained_row(item, row, choice, self.config)
            for item, row in zip(sampling, first_rows, strict=False)
            for choice in item.sequence.choices_to_sample
        ]
        ahead, kept = self._rows_after_drafts(sampling, first_rows)
        logits, found = self._sampler.sample_from(head, [*rows, *ahead], kept)
        tokens, of_ahead = iter(found), found[len(rows) :]
        foreseen = {row.logits_row: token for row, token in zip(ahead, of_ahead, strict=True)}
        sampled = [[next(tokens) for _ in item.sequence.choices_to_sample] for item in sampling]
        self._sample_after_drafts(logits, list(zip(sampling, first_rows, sampled, strict=False)), foreseen)
        of_items = iter(sampled)
        return [next(of_items) if item.sample else [] for item in schedule.items]

    def _on_device(self, *tensors: Tensor) -> Sequence[Tensor]:
        device = self._model.kernels.device
        return tensors if device.type == "cpu" else to_device([tensor.numpy() for tensor in tensors], device)

    def _assign_slots(self, schedule: Schedule) -> list[int]:
        """Each token's adapter slot, -1 for none; empty if the step has no adapter."""
        adapters = [item.sequence.request.adapter for item in schedule.items]
        present = [adapter for adapter in adapters if adapter is not None]
        if not present:
            return []
        if self._slots is None:
            raise ValueError(f"adapter {present[0].name!r}: this engine serves none")
        slots = self._slots.assign(present)
        return [
            -1 if adapter is None else slots[adapter.key]
            for item, adapter in zip(schedule.items, adapters, strict=True)
            for _ in range(item.num_new_tokens)
        ]

    def _adapters(self, slots: Sequence[int]) -> LoraStep | None:
        return self._slots.step(slots) if slots and self._slots is not None else None

    def _report_prompt(self, item: ScheduledSequence, hidden: Tensor, first_row: int, slots: Sequence[int]) -> None:
        """Log-probabilities of the prompt tokens that follow the computed ones, onto the sequence."""
        sequence, start = item.sequence, item.sequence.num_computed_tokens
        num_rows = min(item.num_new_tokens, sequence.num_prompt_tokens - 1 - start)
        following = sequence.token_ids[start + 1 : start + 1 + max(0, num_rows)]
        for done in range(0, len(following), PROMPT_LOGPROB_ROWS):
            token_ids = following[done : done + PROMPT_LOGPROB_ROWS]
            rows = slice(first_row + done, first_row + done + len(token_ids))
            logits = self._model.logits(hidden[rows], self._adapters(slots[rows]))
            sequence.new_prompt_logprobs += self._sampler.logprobs_of(
                logits, token_ids, sequence.params.prompt_logprobs or 0
            )

    def _rows_after_drafts(
        self, sampling: Sequence[ScheduledSequence], first_rows: Sequence[int]
    ) -> tuple[list[SampleRow], list[int]]:
        """Rows that can be asked before it is known whether their drafts come true; and others, by their number."""
        ahead, kept = [], []
        for item, first_row in zip(sampling, first_rows, strict=False):
            sequence = item.sequence
            after = range(1, 1 + len(item.draft_token_ids))
            if sequence.is_constrained or sequence.params.has_penalties:
                kept += [first_row + i for i in after]
            else:
                ahead += [constrained_row(item, first_row + i, sequence.choice, self.config, i) for i in after]
        return ahead, kept

    def _sample_after_drafts(
        self,
        logits: Tensor,
        sampled: list[tuple[ScheduledSequence, int, list[SampledToken]]],
        foreseen: dict[int, SampledToken],
    ) -> None:
        """Goes on where the drawn token is the draft; what was computed after another token is in vain.

        `sampled` has each item, its first row in `logits`, and its tokens so far, which get those that follow.
        `foreseen` are tokens by their row.
        """
        num_accepted = 0
        while sampled := [
            (item, first_row, tokens)
            for item, first_row, tokens in sampled
            if num_accepted < len(item.draft_token_ids) and tokens[-1].token_id == item.draft_token_ids[num_accepted]
        ]:
            num_accepted += 1
            rows = [
                constrained_row(item, first_row + num_accepted, item.sequence.choice, self.config, num_accepted)
                for item, first_row, _ in sampled
                if first_row + num_accepted not in foreseen
            ]
            drawn = iter(self._sampler.sample(logits, rows) if rows else ())
            for _, first_row, tokens in sampled:
                token = foreseen.get(first_row + num_accepted)
                tokens.append(next(drawn) if token is None else token)

"""Runs a model's steps from a record of one: the forward is one native call instead of an op by op from Python.

    24 layers are some 150 ops of 15-30 us of Python each, in which the processor computes nothing and the GIL is held

A record is of one step of `max_rows` rows and serves every step of no more: decodes, drafts, short chunks. Larger ones,
those with adapters, and models whose layers compute something by torch (experts, latent attention, ranks) run op by op.
A row has the same bits in either, as in every batch: the ops are the same.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, cast, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from engine.admission import SchedulerConfig
from engine.layers import StepContext
from engine.lora.step import LoraStep
from engine.memory import KvLayers
from engine.models.decoder import Decoder, Model
from kernels.cpu.recording import RecordedStep, Unrecordable
from kernels.paged import PagedBatch

MAX_ROWS = 256
"""More rows compute long enough for Python not to matter, and a record's intermediates grow with it."""

logger = logging.getLogger(__name__)


@runtime_checkable
class RecordingKernels(Protocol):
    """A kernel set that can record; see `kernels.cpu.recording.record`."""

    def record(self, max_rows: int, inputs: Sequence[Tensor], run: Any) -> RecordedStep: ...
    def plan_inputs(self, plan: Any) -> Sequence[Tensor]: ...


def replaying(model: Model, max_rows: int) -> Callable[..., Tensor] | None:
    """`model.forward` by records of steps of `max_rows` where its kernels can make them; None where they can't."""
    if not isinstance(model, Decoder) or not isinstance(model.kernels, RecordingKernels):
        return None
    return StepReplay(model, max_rows).forward


def most_rows(limits: SchedulerConfig) -> int:
    """Of a step of the served model that is worth a record."""
    return min(limits.max_num_batched_tokens, max(MAX_ROWS, limits.max_num_seqs))


class StepReplay:
    """`Decoder.forward`, from a record where there is one.

    It has one record, of the KV memory that it was last called with: of another, or of one that was closed and made
    anew, it makes another first. A memory that is closed has no layers, so that its record can't be run.
    """

    def __init__(self, model: Decoder, max_rows: int = MAX_ROWS) -> None:
        self._model = model
        self._max_rows = max_rows
        self._recorded: RecordedStep | None = None
        self._recorded_layer: ref[Tensor] | None = None
        """What the record was made with: it lives exactly as long as the pool is mapped, see `KvMemory.close`."""
        self._refused = not isinstance(model.kernels, RecordingKernels) or model.group is not None

    @property
    def recorded(self) -> RecordedStep | None:
        return self._recorded

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        memory: KvLayers,
        adapters: LoraStep | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        num_rows = input_ids.shape[0]
        if self._refused or adapters is not None or not 0 < num_rows <= self._max_rows:
            return self._model.forward(input_ids, positions, batch, memory, adapters)
        layer = _first_layer(memory)  # held to the end: the pool stays mapped should another thread close it meanwhile
        recorded = self._of(layer, memory, batch)
        if recorded is None:
            return self._model.forward(input_ids, positions, batch, memory)
        step = self._model.begin(positions, batch, memory)
        return recorded.run(num_rows, len(batch.kv_lens), self._inputs(input_ids, step))

    def _of(self, layer: Tensor, memory: KvLayers, batch: PagedBatch) -> RecordedStep | None:
        if self._recorded_layer is None or self._recorded_layer() is not layer:
            self._recorded = None
            try:
                self._recorded = self._record(memory, batch)
            except Unrecordable as error:
                self._refused = True
                logger.info("steps run op by op: %s", error)
                return None
            self._recorded_layer = ref(layer)
        return self._recorded

    def _record(self, memory: KvLayers, like: PagedBatch) -> RecordedStep:
        """Of a step with a token for each of `max_rows` sequences, of which nothing is computed."""
        ones = [1] * self._max_rows
        batches = [
            PagedBatch.build(ones, ones, [[0]] * self._max_rows, like.block_size) for _ in range(1 + len(like.others))
        ]
        batch = replace(batches[0], others=tuple(batches[1:]))
        input_ids, positions = torch.zeros(2, self._max_rows, dtype=torch.int64)
        step = self._model.begin(positions, batch, memory)
        inputs = self._inputs(input_ids, step)
        hidden = replace(step, batch=_without_lengths(batch))
        kernels = cast(RecordingKernels, self._model.kernels)
        recorded = kernels.record(self._max_rows, inputs, lambda: self._model.run(input_ids, hidden))
        logger.info("recorded a step: %d ops, %.1f MB", recorded.num_ops, recorded.num_bytes / 1e6)
        return recorded

    def _inputs(self, input_ids: Tensor, step: StepContext) -> list[Tensor]:
        """All that an op may read of a step, always in this order."""
        kernels, batch = cast(RecordingKernels, self._model.kernels), cast(PagedBatch, step.batch)
        inputs = [input_ids.contiguous()]
        for tables in step.tables.values():
            inputs += tables
        for own in (batch, *batch.others):
            inputs += (own.slot_blocks, own.slot_offsets)
        for plan in step.plans.values():
            inputs += kernels.plan_inputs(plan)
        return inputs


def _first_layer(memory: KvLayers) -> Tensor:
    """Its keys, a view of the pool. Raises IndexError if the memory is closed."""
    keys, _ = memory.layer(0)
    return keys if isinstance(keys, Tensor) else keys.values


class _Unknown(tuple[int, ...]):
    """Lengths of which a record must not depend."""

    def __iter__(self) -> NoReturn:
        raise Unrecordable("the model asks for the lengths of the step's sequences")

    def __getitem__(self, _: object) -> NoReturn:
        raise Unrecordable("the model asks for the lengths of the step's sequences")


def _without_lengths(batch: PagedBatch) -> PagedBatch:
    others = tuple(map(_without_lengths, batch.others))
    return replace(batch, cu_seqlens=_Unknown(batch.cu_seqlens), kv_lens=_Unknown(batch.kv_lens), others=others)

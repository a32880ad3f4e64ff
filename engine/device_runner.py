"""Executes steps where the host only queues them: on a GPU, or in Triton's interpreter.

A step in which every sequence decodes one token goes through `engine/decode_step.py`, as a CUDA graph if there is one;
all others (chunks of prompts, several choices, drafts, log-probabilities of a prompt) through `ModelRunner`. Rows whose
logits are changed or reported are drawn again, outside of the graph, from its logits.
"""

from collections.abc import Mapping, Sequence

from engine.admission import SchedulerConfig
from engine.decode_graphs import (
    CudaCapture,
    DecodeGraphs,
    DecodeSteps,
    EagerSteps,
    captures_steps,
    replayed_eagerly,
)
from engine.decode_step import DecodeRow, DecodeStep
from engine.device_sample_rows import needs_edits
from engine.device_sampler import DeviceSampler, Draw
from engine.errors import ModelError
from engine.memory import KvMemory
from engine.models.decoder import Decoder, Model
from engine.parallel.devices import placing
from engine.parallel.model import ParallelModel
from engine.runner import ModelRunner, StepDone
from engine.sample import SampledToken, SampleRow
from engine.sample_row import constrained_row
from engine.sampler import not_finite
from engine.sequence import Schedule, ScheduledSequence
from engine.sequence import Sequence as EngineSequence
from engine.transformers_config import ServedConfig
from kernels.staging import HostCopy
from pagewire.config import EngineOptions


class DrawnByStep:
    """The tokens of a step whose rows needed nothing else, on their way to the host."""

    def __init__(self, copy: HostCopy, rows: Sequence[SampleRow]) -> None:
        self._copy = copy
        self._rows = rows

    def finish(self) -> list[SampledToken]:
        """One token per row."""
        (token_ids,) = self._copy.lists()
        return [
            SampledToken(token_id) if token_id >= 0 else SampledToken(-1, error=not_finite(row.position))
            for token_id, row in zip(token_ids, self._rows, strict=True)
        ]


class StepQueued:
    """A decode step that the device may still work on."""

    def __init__(self, schedule: Schedule, draw: DrawnByStep | Draw) -> None:
        self._draw = draw
        self.rows: Mapping[EngineSequence, int] = {item.sequence: row for row, item in enumerate(schedule.items)}
        """Each sequence's row in `DecodeStep.drawn`."""

    def finish(self) -> list[list[SampledToken]]:
        """One list per item of the schedule; waits for the device."""
        return [[token] for token in self._draw.finish()]


class DeviceRunner:
    """As `ModelRunner`, whose steps it starts without waiting for them."""

    def __init__(
        self,
        model: Decoder,
        memory: KvMemory,
        *,
        max_num_seqs: int,
        max_model_len: int,
        enforce_eager: bool = False,
        longest_captured: int = 8192,
    ) -> None:
        """Captures the decode steps, unless `enforce_eager`, of sequences up to `longest_captured` tokens."""
        config = self.config = model.config
        self._memory = memory
        self._sampler = DeviceSampler(config.vocab_size)
        place = placing(model.kernels, config, memory.layout)
        self._others = ModelRunner(config, model, memory, self._sampler, place=place)
        self.numerics_class = self._others.numerics_class
        size = memory.layout.block_size
        self._step = DecodeStep(model, memory, size, max_rows=max_num_seqs, max_model_len=max_model_len)
        longest = min(max_model_len, longest_captured)
        self._steps = _make_steps(self._step, model, longest, enforce_eager=enforce_eager)

    def execute(self, schedule: Schedule) -> list[list[SampledToken]]:
        """See `ModelRunner.execute`."""
        return self.start(schedule).finish()

    def start(self, schedule: Schedule, before: StepDone | StepQueued | None = None) -> StepDone | StepQueued:
        """Queues the step; `before` is the one of which items that were planned ahead go on."""
        if schedule.is_empty or not all(map(_decodes_one, schedule.items)):
            return StepDone(schedule, self._others.execute(schedule))
        for source, destination in schedule.copies:
            self._memory.copy_block(source, destination)
        samples = [
            constrained_row(item, row, item.sequence.choices_to_sample[0], self.config)
            for row, item in enumerate(schedule.items)
        ]
        rows = before.rows if isinstance(before, StepQueued) else {}
        self._step.fill([_row(item, each, rows) for item, each in zip(schedule.items, samples, strict=True)])
        logits = self._steps.run(len(samples), 1 + max(item.start for item in schedule.items))
        if not any(needs_edits(row) or row.error or row.params.logprobs is not None for row in samples):
            return StepQueued(schedule, DrawnByStep(HostCopy(self._step.drawn[: len(samples)]), samples))
        # A graph's logits are overwritten by the next replay, which may come before somebody looks at these.
        draw = self._sampler.start(logits.clone(), samples)
        if len(draw.token_ids) == len(samples):
            self._step.drawn[: len(samples)].copy_(draw.token_ids)
        return StepQueued(schedule, draw)


def build_device_runner(
    options: EngineOptions, config: ServedConfig, model: Model, memory: KvMemory, limits: SchedulerConfig
) -> DeviceRunner | ModelRunner:
    """The runner of an engine with these options; captures what it will replay.

    Ranks meet in every layer, on the host: their steps are neither captured nor started ahead.
    """
    if isinstance(model, ParallelModel):
        return ModelRunner(config, model, memory, DeviceSampler(config.vocab_size))
    if not isinstance(model, Decoder):
        raise ModelError(f"kernels = {model.kernels.NAME} run pagewire's own models only")
    return DeviceRunner(
        model,
        memory,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        enforce_eager=options.enforce_eager,
        longest_captured=options.max_seq_len_to_capture,
    )


def _make_steps(step: DecodeStep, model: Decoder, longest: int, *, enforce_eager: bool) -> DecodeSteps:
    if not captures_steps(model, enforce_eager=enforce_eager):
        return EagerSteps(step)
    capture = CudaCapture() if model.kernels.device.type == "cuda" else replayed_eagerly
    return DecodeGraphs(step, capture, longest=longest)


def _decodes_one(item: ScheduledSequence) -> bool:
    sequence = item.sequence
    return (
        item.sample
        and item.num_new_tokens == 1
        and len(sequence.choices_to_sample) == 1
        and not sequence.wants_prompt_logprobs
    )


def _row(item: ScheduledSequence, sample: SampleRow, rows: Mapping[EngineSequence, int]) -> DecodeRow:
    sequence, position = item.sequence, item.start
    if item.is_ahead:
        return DecodeRow(sample, position, sequence.tables, sequence.num_released, source=rows[sequence])
    token_id = sequence.token_ids[position]
    return DecodeRow(sample, position, sequence.tables, sequence.num_released, token_id)

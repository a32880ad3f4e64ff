"""What a step's output says about one sequence: its new tokens, and the KV of requests that end with their prompt."""

from collections.abc import Sequence as Seq

from engine.admission import SchedulerConfig
from engine.finish import finish_reason
from engine.request import FinishReason, HeldKv, PrefillProgress, StepOutput, TokenOutput
from engine.sample import SampledToken
from engine.sequence import Sequence
from kvstore.kv_groups import HeldBlocks


def report_tokens(
    sequence: Sequence, tokens: Seq[SampledToken], config: SchedulerConfig, output: StepOutput
) -> dict[int, int]:
    """Reports one token for each sampled choice; returns those (choice -> token id) that go on."""
    going_on: dict[int, int] = {}
    index, num_tokens = sequence.num_output_tokens, sequence.num_tokens + 1
    for choice, token in zip(sequence.choices_to_sample if tokens else (), tokens, strict=True):
        reason = finish_reason(
            token.token_id, index, num_tokens, sequence.params, config.eos_token_ids, config.max_model_len
        )
        if sequence.prefill_only and reason is FinishReason.LENGTH:
            reason = None  # the router owns the length finish
        output.tokens.append(TokenOutput(sequence.request_id, choice, index, token.token_id, token.logprobs, reason))
        if reason is None:
            going_on[choice] = token.token_id
    return going_on


def report_prefill(
    sequence: Sequence, output: StepOutput, num_new_tokens: int, wanted_from: tuple[int, ...] = ()
) -> bool:
    """Reports a `prefill_only` sequence's progress and, True, its end: the references on its blocks go to HeldKv."""
    request_id, num_computed, num_cached = sequence.request_id, sequence.num_computed_tokens, sequence.num_cached_tokens
    (first, block_ids), *others = held_by_group(sequence)
    keys, more = tuple(sequence.keys), tuple(HeldBlocks(*each) for each in others)
    output.progress.append(
        PrefillProgress(request_id, num_computed, num_cached, block_ids, keys, first, more, wanted_from, num_new_tokens)
    )
    if sequence.num_remaining_tokens:
        return False
    output.held.append(HeldKv(request_id, block_ids, keys, num_computed, num_cached, first, more, wanted_from))
    sequence.block_table, sequence.other_tables, sequence.num_released = [], [], []
    return True


def held_by_group(sequence: Sequence) -> list[tuple[int, tuple[int, ...]]]:
    """(number of the first block, block ids) that a sequence has in each KV group."""
    released = sequence.num_released or [0] * len(sequence.tables)
    return [(first, tuple(table[first:])) for first, table in zip(released, sequence.tables, strict=True)]

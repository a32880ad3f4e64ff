"""What is asked of the sampler for a sequence's next token."""

from dataclasses import replace

from engine.sample import SampleRow
from engine.sequence import ScheduledSequence, Sequence
from engine.transformers_config import ServedConfig
from pagewire.grammar import GrammarError


def constrained_row(
    item: ScheduledSequence, logits_row: int, choice: int, config: ServedConfig, num_accepted: int = 0
) -> SampleRow:
    """The row for the token that a scheduled sequence samples; `num_accepted` drafts count as output before it."""
    sequence, accepted = item.sequence, item.draft_token_ids[:num_accepted]
    row = row_of(sequence, logits_row, choice, config.eos_token_ids, accepted, num_unknown=int(item.is_ahead))
    if not sequence.is_constrained:
        return row
    try:  # with what may follow the sequence's output and the drafts that came true: facts, all of them
        mask = sequence.constrain(config.vocab_size).mask([*sequence.output_token_ids, *accepted])
    except GrammarError as error:
        return replace(row, error=f"its grammar failed at position {row.position}: {error}")
    return replace(row, allowed=mask)


def row_of(
    sequence: Sequence,
    logits_row: int,
    choice: int,
    eos_token_ids: tuple[int, ...],
    draft_token_ids: tuple[int, ...] = (),
    num_unknown: int = 0,
) -> SampleRow:
    """The row for the token after the sequence's and `draft_token_ids`, which count as output. Without constraints.

    `num_unknown`: so many tokens follow the sequence's which nobody has read yet; it has no penalties then.
    """
    params, prompt_len, num_more = sequence.params, sequence.num_prompt_tokens, len(draft_token_ids) + num_unknown
    suppressed: tuple[int, ...] = ()
    if sequence.num_output_tokens + num_more < params.min_tokens:
        suppressed = tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids)))
    return SampleRow(
        logits_row=logits_row,
        params=params,
        seed=params.seed or 0,
        choice=choice,
        position=sequence.num_tokens + num_more,
        prompt_token_ids=sequence.token_ids[:prompt_len] if params.has_penalties else (),
        output_token_ids=(*sequence.token_ids[prompt_len:], *draft_token_ids) if params.has_penalties else (),
        suppressed_token_ids=suppressed,
    )

"""What is asked of the sampler for a sequence's next token."""

from engine.sample import SampleRow
from engine.sequence import Sequence


def row_of(
    sequence: Sequence,
    logits_row: int,
    choice: int,
    eos_token_ids: tuple[int, ...],
    draft_token_ids: tuple[int, ...] = (),
) -> SampleRow:
    """The row for the token after the sequence's and `draft_token_ids`, which count as output. Without constraints."""
    params, prompt_len, num_drafts = sequence.params, sequence.num_prompt_tokens, len(draft_token_ids)
    suppressed: tuple[int, ...] = ()
    if sequence.num_output_tokens + num_drafts < params.min_tokens:
        suppressed = tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids)))
    return SampleRow(
        logits_row=logits_row,
        params=params,
        seed=params.seed or 0,
        choice=choice,
        position=sequence.num_tokens + num_drafts,
        prompt_token_ids=sequence.token_ids[:prompt_len] if params.has_penalties else (),
        output_token_ids=(*sequence.token_ids[prompt_len:], *draft_token_ids) if params.has_penalties else (),
        suppressed_token_ids=suppressed,
    )

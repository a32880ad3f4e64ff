"""When a choice ends."""

from engine.request import FinishReason
from pagewire.sampling import SamplingParams


def is_stop_token(token_id: int, index: int, params: SamplingParams, eos_token_ids: frozenset[int]) -> bool:
    """Whether `token_id`, sampled as output token `index`, ends its choice. Never before `min_tokens` others."""
    if index < params.min_tokens:
        return False
    return token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)


def finish_reason(
    token_id: int,
    index: int,
    num_tokens: int,
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> FinishReason | None:
    """Why the choice ends with this token (prompt and output are `num_tokens` with it), or None."""
    if is_stop_token(token_id, index, params, eos_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if is_last(index, num_tokens, params, max_model_len) else None


def is_last(index: int, num_tokens: int, params: SamplingParams, max_model_len: int) -> bool:
    """Whether output token `index` is the last one whatever it is; prompt and output are `num_tokens` with it."""
    return (params.max_tokens is not None and index + 1 >= params.max_tokens) or num_tokens >= max_model_len

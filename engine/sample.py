"""What the sampler is asked and what it answers: plain data, no torch (the scheduler reads it too)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import TokenLogprobs
from pagewire.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw, from row `logits_row` of the step's logits.

    `position` is the absolute position of the token being sampled (prompt length + output index). Together with `seed`
    and `choice` it fixes the noise. `suppressed_token_ids` can't be drawn (EOS and stop ids before min_tokens). Prompt
    and output are read for penalties only and may be empty without them. `allowed` [V], if set, is True for the tokens
    that may be drawn; with `error` nothing may be.
    """

    logits_row: int
    params: SamplingParams
    seed: int
    choice: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    suppressed_token_ids: tuple[int, ...] = ()
    allowed: NDArray[np.bool_] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The drawn token. With `error` set nothing could be drawn: this request alone fails, `token_id` is -1.

    `field` names the parameter that left nothing to draw; without it the error is not the request's fault.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    field: str = ""

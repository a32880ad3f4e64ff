"""What `LLM.generate` and `LLM.chat` give back, shaped as vLLM's outputs are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one candidate at one position; `rank` 1 is the likeliest. `decoded_token` None: no tokenizer is at hand."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    `token_ids` has the token that ended it, `text` has not (unless `include_stop_str_in_output`). `finish_reason` is
    "stop", "length" or "abort"; `stop_reason` the stop string or stop token id, None for the end of sequence.
    `logprobs` has one mapping (token id -> Logprob) for each token: the likeliest, and the chosen one.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Mapping[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Always, here."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds since the epoch, except `time_in_queue`, which is a duration in seconds."""

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    finished_time: float
    time_in_queue: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt with all its choices. `prompt` is None if the prompt was token ids.

    `num_cached_tokens` are prompt tokens whose KV was in the prefix cache. `prompt_logprobs`, if asked for, has None
    for the prompt's first token and a mapping (token id -> Logprob) for each further: the likeliest, and the token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None

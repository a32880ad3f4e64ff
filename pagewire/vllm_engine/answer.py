"""One Generate's output as its messages: chunks while it streams, then one Complete for each choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.vllm_engine.call import Call


class LogprobsLike(Protocol):
    """Log-probabilities of one token, the router's or the engine's."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLike] = field(default_factory=list)
    finish_reason: str = ""
    stop_string: str = ""


class Answer:
    """Collects what choices bring. A Complete has all of its choice's tokens, streamed ones too."""

    def __init__(self, call: Call, num_prompt_tokens: int) -> None:
        self._call = call
        self._num_prompt_tokens = num_prompt_tokens
        self._choices = [_Choice() for _ in range(call.sampling.n)]

    def add(
        self,
        choice: int,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsLike],
        finish_reason: str = "",
        stop_string: str = "",
    ) -> pb.GenerateResponse | None:
        """Takes new output; the chunk to send, if the caller wants a stream."""
        state = self._choices[choice]
        state.token_ids += token_ids
        state.logprobs += logprobs
        state.finish_reason, state.stop_string = finish_reason, stop_string
        if not self._call.stream or not token_ids:
            return None
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=token_ids,
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(token_ids),
                output_logprobs=_logprobs(token_ids, logprobs),
                index=choice,
            )
        )

    def complete(self, num_cached_tokens: int, *, kv_transfer_params_json: str = "") -> list[pb.GenerateResponse]:
        """The last messages. A choice that has not ended was aborted."""
        return [
            pb.GenerateResponse(complete=self._complete(number, state, num_cached_tokens, kv_transfer_params_json))
            for number, state in enumerate(self._choices)
        ]

    def _complete(self, number: int, state: _Choice, num_cached_tokens: int, kv_json: str) -> pb.GenerateComplete:
        message = pb.GenerateComplete(
            output_ids=state.token_ids,
            finish_reason=state.finish_reason or "abort",
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(state.token_ids),
            cached_tokens=num_cached_tokens,
            output_logprobs=_logprobs(state.token_ids, state.logprobs),
            index=number,
        )
        if kv_json:
            message.kv_transfer_params_json = kv_json
        if state.stop_string:
            message.matched_stop_str = state.stop_string
        elif state.finish_reason == "stop" and state.token_ids[-1] in self._call.sampling.stop_token_ids:
            message.matched_token_id = state.token_ids[-1]
        return message


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[LogprobsLike]) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=token_ids,
        top_logprobs=[
            pb.TopLogProbs(values=[value for _, value in each.top], token_ids=[token_id for token_id, _ in each.top])
            for each in logprobs
        ],
    )

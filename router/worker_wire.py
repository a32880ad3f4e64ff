"""Plain data to and from the messages that router and workers exchange."""

from pagewire.v1 import decode_pb2, types_pb2
from pagewire.wire import sampling_to_proto
from pagewire.worker_view_wire import label_to_proto, prefix_source_to_proto
from router.request import FinishReason, Logprobs, Token, TransferSource, WorkerCall

_MAX_TIMEOUT_MS = (1 << 32) - 1
FINISH_REASONS = {reason.value: reason for reason in FinishReason}


def worker_request(call: WorkerCall) -> types_pb2.WorkerRequest:
    """One attempt as workers read it."""
    message = types_pb2.WorkerRequest(
        request_id=call.request_id,
        model=call.model,
        prompt_token_ids=call.prompt_token_ids,
        num_prompt_tokens=len(call.prompt_token_ids),
        sampling=sampling_to_proto(call.sampling),
        cache_salt=call.cache_salt,
        priority=call.priority,
        tenant=call.tenant,
        traceparent=call.traceparent,
        num_expected_tokens=call.num_expected_tokens,
    )
    if call.seconds_left is not None:
        # 0 would mean no deadline.
        message.timeout_ms = min(max(1, round(call.seconds_left * 1000)), _MAX_TIMEOUT_MS)
    if call.adapter is not None:
        message.adapter.CopyFrom(label_to_proto(call.adapter))
    for number, choice in call.choices.items():
        message.choices.add(choice=number, output_token_ids=choice.output_token_ids, finished=choice.finished)
    message.prefix_sources.extend(prefix_source_to_proto(source) for source in call.prefix_sources)
    return message


def decode_request(call: WorkerCall, source: TransferSource | None) -> decode_pb2.DecodeRequest:
    """One attempt at a decode worker; without `source` it prefills by itself."""
    message = decode_pb2.DecodeRequest(request=worker_request(call))
    if source is not None:
        message.source.endpoint = source.endpoint
        message.source.worker_id = source.worker_id
        message.source.incarnation = source.incarnation
        message.source.ticket = source.ticket
    return message


def logprobs(message: types_pb2.TokenLogprobs) -> Logprobs:
    """Log-probabilities of one token."""
    return Logprobs(message.logprob, message.rank, tuple((top.token_id, top.logprob) for top in message.top))


def token(message: types_pb2.TokenOutput) -> Token:
    """One token of a Prefill stream."""
    return Token(
        message.choice,
        message.index,
        message.token_id,
        logprobs(message.logprobs) if message.HasField("logprobs") else None,
        FINISH_REASONS.get(message.finish_reason),
    )

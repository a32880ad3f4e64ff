"""VllmEngine on a decode worker: prefills by itself, or goes on from what a prefill worker has handed off.

A gateway expects the first token from here. The prefill worker has sampled it already, and a token that exists is a
fact: it comes with the hand-off and is the first one out, and the engine goes on behind it. Only the prefill request
did not know when to stop (gateways strip that from it), so whether the first token is the last is found out here.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from uuid import uuid4

from decode_svc.intake import Source
from decode_svc.outbox import Accepted, Outbox
from decode_svc.worker import DecodeWorker
from engine.admission import SchedulerConfig
from engine.finish import finish_reason, is_stop_token
from engine.request import ChoiceState, EngineRequest, TokenLogprobs, TokenOutput
from pagewire.errors import InvalidArgument, PagewireError
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.vllm_engine.aborts import until
from pagewire.vllm_engine.answer import Answer
from pagewire.vllm_engine.call import Call
from pagewire.vllm_engine.caller import caller_of
from pagewire.vllm_engine.facade import Context
from pagewire.vllm_engine.hand_off import RemoteKv, hand_off_from_request
from pagewire.vllm_engine.kv_stream import Journal
from pagewire.vllm_engine.model_card import ModelCard
from pagewire.vllm_engine.stop_strings import StopStringsSource
from pagewire.vllm_engine.worker_facade import WorkerVllmEngine


class DecodeVllmEngine(WorkerVllmEngine):
    """On the worker that DecodeService runs on too."""

    def __init__(self, worker: DecodeWorker, journal: Journal, card: ModelCard, limits: SchedulerConfig) -> None:
        super().__init__(worker, journal, card)
        self._worker = worker
        self._engine_limits = limits
        self._stop_strings = StopStringsSource(card.directory)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            call, prompt = self._call(request)
            source = _source(call, prompt)
            stops = await self._stop_strings.watch(call)
        except (PagewireError, asyncio.CancelledError):
            self._give_back_unread(request)
            raise
        seed = call.sampling.seed
        if seed is None:
            seed = secrets.randbits(64) if source is None else source.seed
        caller = caller_of(context)
        # The client's id need not be unique.
        engine_request = EngineRequest(
            f"vllm-{uuid4().hex}", prompt, replace(call.sampling, seed=seed), tenant=caller.tenant
        )
        answer = Answer(call, len(prompt))
        num_cached_tokens = 0 if source is None else source.num_cached_tokens
        open_choices = set(range(call.sampling.n))
        with self._aborts.watch(caller, call.request_id) as aborted:
            async with aclosing(until(aborted, self._outputs(engine_request, source))) as outputs:
                async for output in outputs:
                    if isinstance(output, int):
                        num_cached_tokens = output
                        continue
                    if output.choice not in open_choices:
                        continue
                    stop = "" if stops is None else stops.push(output.choice, output.token_id)
                    finish = "" if output.finish_reason is None else output.finish_reason.value
                    logprobs = [] if output.logprobs is None else [output.logprobs]
                    chunk = answer.add(output.choice, (output.token_id,), logprobs, "stop" if stop else finish, stop)
                    if chunk is not None:
                        yield chunk
                    if stop or finish:
                        open_choices.discard(output.choice)
                    if not open_choices:
                        break
        for message in answer.complete(num_cached_tokens):
            yield message

    def _give_back_unread(self, request: pb.GenerateRequest) -> None:
        """The prefill worker should not keep KV for a request that is refused."""
        with suppress(InvalidArgument):
            hand_off = hand_off_from_request(request)
            if hand_off is not None and hand_off.source is not None:
                self._worker.give_back(_ticket(hand_off.source))

    async def _outputs(self, request: EngineRequest, source: RemoteKv | None) -> AsyncGenerator[TokenOutput | int]:
        """Tokens; and the number of cached tokens, unless that is the prefill worker's to say."""
        kv = first = None
        if source is not None:
            kv, first = _ticket(source), self._first_token(request, source)
            if first is None or first.finish_reason is not None:
                self._worker.give_back(kv)
                kv = None
            if first is not None and first.finish_reason is not None:
                yield first
                return
            if first is not None:
                request = replace(request, choices=(ChoiceState(0, (first.token_id,)),))
        outbox = Outbox()
        try:
            self._worker.submit(request, kv, outbox, 0)
        except PagewireError:
            if kv is not None:
                self._worker.give_back(kv)
            raise
        has_ended = False
        try:
            if first is not None:
                yield first
            async with aclosing(outbox.outputs()) as outputs:
                async for output in outputs:
                    if isinstance(output, TokenOutput):
                        yield output
                    elif isinstance(output, Accepted) and source is None:
                        yield output.num_cached_tokens
            has_ended = True
        finally:
            self._worker.cancel(request.request_id)
            if kv is not None and not has_ended:
                self._worker.give_back(kv)  # it may not even have been attached, and no router does it

    def _first_token(self, request: EngineRequest, source: RemoteKv) -> TokenOutput | None:
        """The prefill worker's token as it is here; None if it could not have been drawn here (`min_tokens`)."""
        params, limits, token_id = request.params, self._engine_limits, source.first_token.token_id
        eager = replace(params, min_tokens=0)
        if params.min_tokens and is_stop_token(token_id, 0, eager, limits.eos_token_ids):
            return None
        first = source.first_token
        return TokenOutput(
            request_id=request.request_id,
            choice=0,
            index=0,
            token_id=token_id,
            logprobs=None if first.logprob is None else TokenLogprobs(first.logprob, first.rank, first.top),
            finish_reason=finish_reason(
                token_id,
                0,
                len(request.prompt_token_ids) + 1,
                params,
                limits.eos_token_ids,
                limits.max_model_len,
            ),
        )


def _ticket(source: RemoteKv) -> Source:
    return Source(source.endpoint, source.worker_id, source.incarnation, source.ticket)


def _source(call: Call, prompt: tuple[int, ...]) -> RemoteKv | None:
    field = "kv_transfer_params_json"
    if call.hand_off is None:
        return None
    source = call.hand_off.source
    if source is None:
        raise InvalidArgument(field, None, "do_remote_decode is for prefill workers")
    if call.sampling.n != 1:
        raise InvalidArgument("sampling_params.n", call.sampling.n, f"must be 1 with {field}: they carry one token")
    if source.num_prompt_tokens != len(prompt):
        limit = f"must be the number of prompt tokens, {len(prompt)}"
        raise InvalidArgument(f"{field}.pagewire.num_prompt_tokens", source.num_prompt_tokens, limit)
    return source

"""VllmEngine on a prefill worker: one token, and with `do_remote_decode` the KV is kept for a decode worker."""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

from engine.request import EngineRequest, FinishReason, TokenOutput
from pagewire.errors import InvalidArgument
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.vllm_engine.aborts import until
from pagewire.vllm_engine.answer import Answer
from pagewire.vllm_engine.call import Call
from pagewire.vllm_engine.caller import caller_of
from pagewire.vllm_engine.facade import Context
from pagewire.vllm_engine.hand_off import FirstToken, RemoteKv, hand_off_to_json
from pagewire.vllm_engine.kv_stream import Journal
from pagewire.vllm_engine.model_card import ModelCard
from pagewire.vllm_engine.worker_facade import WorkerVllmEngine
from prefill_svc.stream import Done
from prefill_svc.worker import PrefillWorker


class PrefillVllmEngine(WorkerVllmEngine):
    """On the worker that PrefillService runs on too."""

    def __init__(self, worker: PrefillWorker, journal: Journal, card: ModelCard) -> None:
        super().__init__(worker, journal, card)
        self._worker = worker

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        call, prompt = self._call(request)
        _check(call)
        seed = secrets.randbits(64) if call.sampling.seed is None else call.sampling.seed
        params = replace(call.sampling, seed=seed)
        caller = caller_of(context)
        # The client's id need not be unique, and a ticket hangs on it.
        engine_request = EngineRequest(f"vllm-{uuid4().hex}", prompt, params, prefill_only=True, tenant=caller.tenant)
        answer = Answer(call, len(prompt))
        num_cached_tokens, hand_off = 0, ""
        stream = self._worker.prefill(engine_request, hand_off=call.hand_off is not None)
        try:
            with self._aborts.watch(caller, call.request_id) as aborted:
                async with aclosing(until(aborted, stream.events())) as events:
                    async for event in events:
                        if not isinstance(event, Done):
                            continue
                        num_cached_tokens = event.num_cached_tokens
                        if stream.ticket:
                            hand_off = self._hand_off(stream.ticket, seed, len(prompt), event)
                        for token in event.tokens:
                            chunk = _add(answer, token)
                            if chunk is not None:
                                yield chunk
            for message in answer.complete(num_cached_tokens, kv_transfer_params_json=hand_off):
                yield message
        finally:
            self._worker.cancel(stream)

    def _hand_off(self, ticket: bytes, seed: int, num_prompt_tokens: int, done: Done) -> str:
        (token,) = done.tokens
        logprobs = token.logprobs
        first = FirstToken(token.token_id)
        if logprobs is not None:
            first = FirstToken(token.token_id, logprobs.logprob, logprobs.rank, logprobs.top)
        me = self._worker.description
        return hand_off_to_json(
            RemoteKv(
                me.endpoint,
                me.worker_id,
                me.incarnation,
                ticket,
                seed,
                num_prompt_tokens,
                done.num_cached_tokens,
                first,
            )
        )


def _add(answer: Answer, token: TokenOutput) -> pb.GenerateResponse | None:
    finish = "stop" if token.finish_reason is FinishReason.STOP else "length"
    logprobs = [] if token.logprobs is None else [token.logprobs]
    return answer.add(token.choice, (token.token_id,), logprobs, finish)


def _check(call: Call) -> None:
    if call.sampling.max_tokens != 1:
        limit = "must be 1: a prefill worker makes the first token, a decode worker the others"
        raise InvalidArgument("sampling_params.max_tokens", call.sampling.max_tokens, limit)
    if call.hand_off is None:
        return
    if call.hand_off.source is not None:
        raise InvalidArgument("kv_transfer_params_json", None, "do_remote_prefill is for decode workers")
    if call.sampling.n != 1:
        limit = "must be 1 with kv_transfer_params_json: they carry one first token"
        raise InvalidArgument("sampling_params.n", call.sampling.n, limit)

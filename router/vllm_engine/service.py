"""VllmEngine on the router: a gateway sees the whole system as one worker. Nothing is decided here."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc

from pagewire.errors import InvalidArgument, from_rpc_error
from pagewire.foreign.smg import common_pb2
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.vllm_engine.aborts import until
from pagewire.vllm_engine.answer import Answer
from pagewire.vllm_engine.call import Call, call_from_proto
from pagewire.vllm_engine.caller import caller_of
from pagewire.vllm_engine.facade import Context, VllmEngineFacade
from pagewire.vllm_engine.kv_stream import KvEventStreams
from pagewire.vllm_engine.load import Limits, Load
from pagewire.vllm_engine.model_card import ModelCard
from pagewire.wire import validate_sampling
from router.backend import Started
from router.fleet import Fleet, FleetWorker
from router.pipeline import Pipeline
from router.request import GenerateCall, Piece, Summary, TextOptions, TextPrompt, TokenPrompt
from router.service import MAX_LABEL_LENGTH
from router.vllm_engine.kv_relay import KvRelay

_FLUSH_SECONDS = 10.0


class RouterVllmEngine(VllmEngineFacade):
    """On the pipeline that serves everybody else too."""

    def __init__(self, pipeline: Pipeline, fleet: Fleet, card: ModelCard) -> None:
        super().__init__(card)
        self._pipeline = pipeline
        self._fleet = fleet
        self._relay = KvRelay(fleet)
        self._kv_events = KvEventStreams(self._relay, self._relay.wait_for_change, self.load)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self._note_request()
        call = call_from_proto(request)
        if call.hand_off is not None:
            limit = "is for prefill and decode workers; a router hands nothing off"
            raise InvalidArgument("kv_transfer_params_json", None, limit)
        limits = self.limits()
        # Before anything is made of its numbers.
        validate_sampling(call.sampling, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        answer, num_cached_tokens = Answer(call, 0), 0
        outputs = self._pipeline.generate(_generate_call(call, context), seconds_left=context.time_remaining())
        with self._aborts.watch(caller_of(context), call.request_id) as aborted:
            async with aclosing(until(aborted, outputs)) as wanted:
                async for output in wanted:
                    if isinstance(output, Started):
                        answer = Answer(call, output.num_prompt_tokens)
                    elif isinstance(output, Piece):
                        finish = "" if output.finish_reason is None else output.finish_reason.name.lower()
                        chunk = answer.add(output.choice, output.token_ids, output.logprobs, finish, output.stop_reason)
                        if chunk is not None:
                            yield chunk
                    elif isinstance(output, Summary):
                        num_cached_tokens = output.cached_tokens
        for message in answer.complete(num_cached_tokens):
            yield message

    # --- what the process is ---

    def load(self) -> Load:
        """The decode workers' pools and windows; every worker's queue."""
        workers = self._available()
        decoding = [worker for worker in workers if worker.description.role == "decode"]
        return Load(
            num_running=self._pipeline.num_active,
            num_waiting=sum(worker.load.num_waiting for worker in workers),
            num_waiting_tokens=sum(worker.load.num_queued_tokens for worker in workers),
            num_used_tokens=sum(_pool_tokens(w, w.description.num_blocks - w.load.num_free_blocks) for w in decoding),
            num_pool_tokens=sum(_pool_tokens(w, w.description.num_blocks) for w in decoding),
            max_running=sum(worker.description.max_num_seqs for worker in decoding),
        )

    def limits(self) -> Limits:
        return Limits(self._pipeline.max_model_len, self._pipeline.model.vocab_size)

    def problem(self) -> str:
        return "the router is draining" if self._pipeline.draining else self._pipeline.problem

    def server_info(self) -> pb.GetServerInfoResponse:
        fingerprints = {worker.description.fingerprint for worker in self._available()}
        return pb.GetServerInfoResponse(block_size=min((each.block_size for each in fingerprints), default=0))

    def kv_events(self) -> KvEventStreams:
        return self._kv_events

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncGenerator[common_pb2.KvEventBatch]:
        self._relay.start()
        try:
            async with aclosing(super().SubscribeKvEvents(request, context)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await self._relay.stop()

    async def close(self) -> None:
        """Ends what follows workers, and is followed."""
        self._kv_events.close()
        await self._relay.close()

    async def flush(self) -> int:
        stubs = [admin_pb2_grpc.AdminServiceStub(worker.channel) for worker in self._available()]
        message = admin_pb2.ResetPrefixCacheRequest()
        try:
            answers = await asyncio.gather(*(stub.ResetPrefixCache(message, timeout=_FLUSH_SECONDS) for stub in stubs))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return sum(answer.num_blocks for answer in answers)

    def _available(self) -> list[FleetWorker]:
        return [worker for worker in self._fleet.workers().values() if worker.is_available]


def _pool_tokens(worker: FleetWorker, num_blocks: int) -> int:
    return num_blocks * worker.description.fingerprint.block_size


def _generate_call(call: Call, context: Context) -> GenerateCall:
    """Labels come in the metadata, and so does the cache salt, for which this protocol has no field."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return GenerateCall(
        prompt=TextPrompt(call.prompt) if isinstance(call.prompt, str) else TokenPrompt(call.prompt),
        sampling=call.sampling,
        text_options=TextOptions(call.stop, call.include_stop_str_in_output),
        client_request_id=call.request_id,
        tenant=metadata.get("x-tenant", "")[:MAX_LABEL_LENGTH],
        traceparent=metadata.get("traceparent", "")[:MAX_LABEL_LENGTH],
        session_id=metadata.get("x-session-id", "")[:MAX_LABEL_LENGTH],
        cache_salt=metadata.get("x-cache-salt", ""),
        truncate_prompt_tokens=call.truncate_to,
    )

"""InferenceService: translates between protobuf and the pipeline, and nothing else."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from pagewire.errors import InvalidArgument
from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagewire.wire import sampling_from_proto
from pagewire.worker_wire import logprobs_to_proto
from router.backend import Started
from router.pipeline import Pipeline
from router.request import (
    BeamSearch,
    ChatPrompt,
    GenerateCall,
    Piece,
    Prompt,
    PromptLogprobs,
    Summary,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)
from router.validate import validate_model, validate_token_ids

# Detokenize answers in one message; this many ids stay far below its size limit.
MAX_DETOKENIZE_IDS = 1 << 20
# Of x-tenant, x-session-id and traceparent.
MAX_LABEL_LENGTH = 128


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public API on top of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        started: Started | None = None
        is_first = True
        seconds_left: float | None = context.time_remaining()
        async with aclosing(self._pipeline.generate(_call(request, context), seconds_left=seconds_left)) as outputs:
            async for output in outputs:
                if isinstance(output, Started):
                    started = output
                    continue
                response = _response(output)
                if started is not None:
                    response.request_id = started.request_id
                    if is_first or response.done:
                        response.seed = started.seed
                is_first = False
                yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        validate_model(request.model, self._pipeline.model, self._pipeline.adapters)
        token_ids = await self._pipeline.tokenize(_tokenize_prompt(request))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=self._pipeline.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        model = self._pipeline.model
        validate_model(request.model, model, self._pipeline.adapters)
        token_ids = tuple(request.token_ids)
        if len(token_ids) > MAX_DETOKENIZE_IDS:
            raise InvalidArgument("token_ids", None, f"has {len(token_ids)} ids, must be at most {MAX_DETOKENIZE_IDS}")
        validate_token_ids("token_ids", token_ids, model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return inference_pb2.DetokenizeResponse(
            text=await self._pipeline.detokenize(token_ids, skip_special_tokens=skip)
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        """The model, then its adapters."""
        model = self._pipeline.model
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=name,
                    max_model_len=self._pipeline.max_model_len,
                    vocab_size=model.vocab_size,
                    has_chat_template=model.tokenizer.chat_template is not None,
                    ready=self._pipeline.is_ready,
                    parent=parent,
                )
                for name, parent in (
                    (model.name, ""),
                    *((each, model.name) for each in sorted(self._pipeline.adapters)),
                )
            ]
        )


def _call(request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> GenerateCall:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return call_from_proto(request, metadata)


def call_from_proto(request: inference_pb2.GenerateRequest, metadata: Mapping[str, str]) -> GenerateCall:
    """What the client asked for; labels come in the metadata."""
    options = request.text_options
    skip = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
    return GenerateCall(
        prompt=_prompt(request),
        sampling=sampling_from_proto(request.sampling),
        text_options=TextOptions(
            tuple(options.stop), options.include_stop_str_in_output, skip, tuple(options.bad_words)
        ),
        truncate_prompt_tokens=request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        best_of=request.best_of if request.HasField("best_of") else None,
        beam_search=_beam_search(request),
        model=request.model,
        cache_salt=request.cache_salt,
        priority=request.priority,
        adapter=request.adapter,
        client_request_id=request.request_id,
        tenant=metadata.get("x-tenant", "")[:MAX_LABEL_LENGTH],
        traceparent=metadata.get("traceparent", "")[:MAX_LABEL_LENGTH],
        session_id=metadata.get("x-session-id", "")[:MAX_LABEL_LENGTH],
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt | None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "chat":
        return _chat(request.chat)
    if kind == "tokens":
        return TokenPrompt(tuple(request.tokens.token_ids))
    return None


def _tokenize_prompt(request: inference_pb2.TokenizeRequest) -> Prompt | None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return TextPrompt(request.text, special)
    return _chat(request.chat) if kind == "chat" else None


def _chat(chat: inference_pb2.ChatPrompt) -> ChatPrompt:
    return ChatPrompt(
        tuple((message.role, message.content) for message in chat.messages),
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        chat.template_kwargs_json,
        tuple(message.fields_json for message in chat.messages),
        chat.tools_json,
    )


def _beam_search(request: inference_pb2.GenerateRequest) -> BeamSearch | None:
    if not request.HasField("beam_search"):
        return None
    asked = request.beam_search
    stop = {inference_pb2.BEAM_STOP_FIRST: True, inference_pb2.BEAM_STOP_NEVER: None}.get(asked.early_stopping, False)
    return BeamSearch(asked.num_beams, asked.length_penalty if asked.HasField("length_penalty") else 1.0, stop)


def _response(output: PromptLogprobs | Piece | Summary) -> inference_pb2.GenerateResponse:
    if isinstance(output, Piece):
        return _piece(output)
    return _summary(output) if isinstance(output, Summary) else _prompt_logprobs(output)


def _prompt_logprobs(found: PromptLogprobs) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        prompt_logprobs=[logprobs_to_proto(entry) for entry in found.entries],
        prompt_logprobs_start=found.start,
        prompt_token_ids=found.token_ids,
    )


def _piece(piece: Piece) -> inference_pb2.GenerateResponse:
    """One for each token and stream: what a piece rarely has is set only if it has it."""
    response = inference_pb2.GenerateResponse(
        choice=piece.choice, index=piece.index, text=piece.text, token_ids=piece.token_ids
    )
    if piece.logprobs:
        response.logprobs.extend(map(logprobs_to_proto, piece.logprobs))
    if piece.finish_reason is not None:
        response.finish_reason = types_pb2.FinishReason.ValueType(piece.finish_reason.value)
        response.stop_reason = piece.stop_reason
    if piece.beam_score is not None:
        response.beam_score = piece.beam_score
    return response


def _summary(summary: Summary) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        usage=inference_pb2.Usage(
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=summary.completion_tokens,
            cached_tokens=summary.cached_tokens,
        ),
        timing=inference_pb2.Timing(queue_ms=summary.queue_ms, ttft_ms=summary.ttft_ms, total_ms=summary.total_ms),
        prefill_worker=summary.prefill_worker,
        decode_worker=summary.decode_worker,
        done=True,
    )

"""The Open Inference Protocol v2 with Triton's ModelStreamInfer, on the pipeline. Nothing is decided here."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from importlib.metadata import version
from typing import Any, NoReturn

import grpc

from pagewire.errors import InvalidArgument, PagewireError
from pagewire.foreign.triton import grpc_service_pb2 as pb
from pagewire.foreign.triton import grpc_service_pb2_grpc, model_config_pb2
from pagewire.trace import new_error_id
from pagewire.wire import validate_sampling
from router.oip.call import INPUTS, OUTPUTS, InferCall, call_from_proto
from router.oip.parameters import FINAL_RESPONSE
from router.oip.tensors import add_output
from router.pipeline import Pipeline
from router.request import Piece, Summary
from router.validate import validate_model

SERVICE_NAME = "inference.GRPCInferenceService"
# Of one stream; whoever sends more is read later.
MAX_CONCURRENT = 64
_MAX_UNSENT = 1024
_VERSION = "1"

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# What one stream is to say; None ends it.
_Outbox = asyncio.Queue[pb.ModelStreamInferResponse | BaseException | None]


class InferenceProtocolServicer(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """What `tritonclient` and its like call. Methods that are not here answer UNIMPLEMENTED (see below)."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._streams: set[_Outbox] = set()

    async def close(self) -> None:
        """Ends streams whose clients have nothing more to ask but stay; to be called when no request runs."""
        for outbox in self._streams:
            with suppress(asyncio.QueueFull):  # its client does not read; the drain's end will end it
                outbox.put_nowait(None)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: _Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: _Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: _Context) -> pb.ModelReadyResponse:
        is_known = request.name == self._pipeline.model.name or request.name in self._pipeline.adapters
        is_ours = is_known and request.version in ("", _VERSION)
        return pb.ModelReadyResponse(ready=is_ours and self._is_ready)

    @property
    def _is_ready(self) -> bool:
        return self._pipeline.is_ready and not self._pipeline.draining

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: _Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name="pagewire", version=version("pagewire"), extensions=["model_configuration"]
        )

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: _Context) -> pb.ModelMetadataResponse:
        validate_model(request.name, self._pipeline.model, self._pipeline.adapters)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name or self._pipeline.model.name,
            versions=[_VERSION],
            platform="pagewire",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[-1]) for name, datatype in OUTPUTS.items()],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: _Context) -> pb.ModelConfigResponse:
        validate_model(request.name, self._pipeline.model, self._pipeline.adapters)
        return pb.ModelConfigResponse(config=_config(self._pipeline.model.name))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: _Context) -> pb.ModelInferResponse:
        call = call_from_proto(request)
        if call.stream:
            raise InvalidArgument("stream", True, "must be false in ModelInfer; use ModelStreamInfer")
        (response,) = [response async for response in self._infer(call, request, context)]
        return response

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: _Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Requests run side by side; an error ends its own request and is told in a message."""
        outbox: _Outbox = asyncio.Queue(_MAX_UNSENT)
        self._streams.add(outbox)
        reader = asyncio.ensure_future(self._read(requests, outbox, context))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            self._streams.discard(outbox)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(
        self,
        requests: AsyncIterator[pb.ModelInferRequest],
        outbox: "_Outbox",
        context: _Context,
    ) -> None:
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                async with aclosing(self._answer(request, context)) as responses:
                    async for response in responses:
                        await outbox.put(response)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as running:
                async for request in requests:
                    await room.acquire()
                    running.create_task(answer(request))
        except BaseExceptionGroup as group:
            await outbox.put(group.exceptions[0])
        except Exception as error:
            await outbox.put(error)
        await outbox.put(None)

    async def _answer(
        self, request: pb.ModelInferRequest, context: _Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse]:
        try:
            async with aclosing(self._infer(call_from_proto(request), request, context)) as responses:
                async for response in responses:
                    yield pb.ModelStreamInferResponse(infer_response=response)
        except Exception as error:
            response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
            response.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(error_message=_message(error), infer_response=response)

    async def _infer(
        self, call: InferCall, request: pb.ModelInferRequest, context: _Context
    ) -> AsyncGenerator[pb.ModelInferResponse]:
        """One response for each piece if it streams, else one for all; then an empty last one for who wants it."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        generate_call = call.generate_call(request, metadata)
        # Before anything is made of its numbers.
        model, max_model_len = self._pipeline.model, self._pipeline.max_model_len
        validate_sampling(generate_call.sampling, vocab_size=model.vocab_size, max_model_len=max_model_len)
        limits = [limit for limit in (context.time_remaining(), call.parameters.seconds) if limit is not None]
        whole = [Piece(number, 0, call.text if call.echo else "") for number in range(generate_call.sampling.n)]
        num_open = len(whole)
        # Of each choice: tokens that have come and whose text has not, as in the middle of a character.
        num_untold = [0] * len(whole)
        outputs = self._pipeline.generate(generate_call, seconds_left=min(limits, default=None))
        async with aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Piece):
                    num_open -= output.finish_reason is not None
                    if not call.stream:
                        whole[output.choice].extend(output)
                        continue
                    num_untold[output.choice] += len(output.token_ids)
                    if output.text or output.finish_reason is not None:
                        yield self._piece(call, request, output, num_untold, is_last=num_open == 0)
                        num_untold[output.choice] = 0
                elif isinstance(output, Summary) and not call.stream:
                    num_tokens = [len(piece.token_ids) for piece in whole]
                    yield self._response(call, request, whole, num_tokens, output.prompt_tokens, is_last=True)
        if call.stream and call.parameters.control.get(FINAL_RESPONSE) is True:
            empty = pb.ModelInferResponse(
                model_name=request.model_name or self._pipeline.model.name, model_version=_VERSION, id=request.id
            )
            empty.parameters["triton_final_response"].bool_param = True
            yield empty

    def _piece(
        self,
        call: InferCall,
        request: pb.ModelInferRequest,
        piece: Piece,
        num_untold: Sequence[int],
        *,
        is_last: bool,
    ) -> pb.ModelInferResponse:
        """Every choice has its place in each tensor, empty where nothing is new."""
        pieces = [Piece(number, 0) for number in range(len(num_untold))]
        pieces[piece.choice] = piece
        num_tokens = [count if number == piece.choice else 0 for number, count in enumerate(num_untold)]
        is_last = is_last and call.parameters.control.get(FINAL_RESPONSE) is not True
        return self._response(call, request, pieces, num_tokens, None, is_last=is_last)

    def _response(
        self,
        call: InferCall,
        request: pb.ModelInferRequest,
        pieces: Sequence[Piece],
        num_tokens: Sequence[int],
        num_prompt_tokens: int | None,
        *,
        is_last: bool,
    ) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(
            model_name=request.model_name or self._pipeline.model.name, model_version=_VERSION, id=request.id
        )
        response.parameters["triton_final_response"].bool_param = is_last
        columns: dict[str, Sequence[str | int]] = {
            "text_output": [piece.text for piece in pieces],
            "finish_reason": ["" if p.finish_reason is None else p.finish_reason.name.lower() for p in pieces],
            "num_input_tokens": [num_prompt_tokens or 0],
            "num_output_tokens": num_tokens,
        }
        for name in call.outputs:
            if name != "num_input_tokens" or num_prompt_tokens is not None:
                add_output(response, name, OUTPUTS[name], columns[name], raw=call.raw)
        return response


def add_to_server(pipeline: Pipeline, server: grpc.aio.Server) -> InferenceProtocolServicer:
    """Adds the service. Repository, shared memory, statistics, tracing and logging are refused by name."""
    # The stub's base class is abstract for mypy alone.
    servicer = InferenceProtocolServicer(pipeline)  # type: ignore[abstract]
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.name not in vars(InferenceProtocolServicer):
            setattr(servicer, method.name, _refusal(method.name))
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    return servicer


def _message(error: Exception) -> str:
    """What the client is told. The text of what should not happen stays in the log."""
    if isinstance(error, PagewireError):
        return error.message
    error_id = new_error_id()
    logger.exception("a request of ModelStreamInfer failed (error id %s)", error_id, extra={"error_id": error_id})
    return f"internal error {error_id} ({type(error).__name__}); the server's log has the traceback"


def _refusal(name: str) -> Callable[[Any, _Context], Awaitable[NoReturn]]:
    async def refuse(request: object, context: _Context) -> NoReturn:
        raise PagewireError(f"pagewire has no {name}", code=grpc.StatusCode.UNIMPLEMENTED)

    return refuse


def _config(name: str) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig(name=name, platform="pagewire", backend="pagewire", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for tensor, datatype in INPUTS.items():
        config.input.add(name=tensor, data_type=_data_type(datatype), dims=[1], optional=tensor != "text_input")
    for tensor, datatype in OUTPUTS.items():
        config.output.add(name=tensor, data_type=_data_type(datatype), dims=[-1])
    return config


def _data_type(datatype: str) -> model_config_pb2.DataType.ValueType:
    return model_config_pb2.TYPE_STRING if datatype == "BYTES" else model_config_pb2.DataType.Value(f"TYPE_{datatype}")

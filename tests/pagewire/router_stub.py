"""A router that echoes: enough of the public and admin API for the client's and the CLI's tests, on a real socket.

The "tokens" of a text are its characters, one message each. Prompts starting with "!" misbehave.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from pagewire import rpc
from pagewire.errors import InvalidArgument, ResourceExhausted
from pagewire.security import Security
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from pagewire.wire import sampling_from_proto, validate_sampling

SERVICES = ("pagewire.v1.InferenceService", "pagewire.v1.AdminService")


class StubRouter(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Remembers its requests and whether a stream was cancelled; `fail_next` is the message of one failure."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.tokenized: list[Any] = []
        self.cancelled = Event()
        self.fail_next = ""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        params = sampling_from_proto(request.sampling)
        validate_sampling(params, vocab_size=1000, max_model_len=1000)
        form = request.WhichOneof("prompt")
        text = {
            "text": lambda: request.text,
            "chat": lambda: f"{len(request.chat.messages)}:{request.chat.messages[-1].content}",
            "tokens": lambda: "".join(map(chr, request.tokens.token_ids)),
        }[form]()
        if self.fail_next:
            message, self.fail_next = self.fail_next, ""
            raise ResourceExhausted(message)
        if text.startswith("!full"):
            raise ResourceExhausted("queue is full (3 of 3)", retry_after_s=2)
        if text.startswith("!model"):
            raise InvalidArgument("text", text, "must not start with '!'")
        output = text[: params.max_tokens]
        logprobs = [types_pb2.TokenLogprobs(logprob=-0.5, rank=1)] if request.sampling.HasField("logprobs") else []
        try:
            for choice in range(params.n):
                for index, character in enumerate(output):
                    last = index == len(output) - 1
                    yield inference_pb2.GenerateResponse(
                        request_id="r1",
                        choice=choice,
                        index=index,
                        text=character,
                        token_ids=[ord(character)],
                        finish_reason=types_pb2.FINISH_REASON_LENGTH if last else 0,
                        logprobs=logprobs,
                    )
            if text.startswith("!hang"):
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            # The former while it waits, the latter while a message of it is being sent.
            self.cancelled.set()
            raise
        if not text.startswith("!cut"):
            yield inference_pb2.GenerateResponse(
                request_id="r1",
                seed=params.seed or 7,
                done=True,
                usage=inference_pb2.Usage(prompt_tokens=len(text), completion_tokens=len(output) * params.n,
                                          cached_tokens=16),
                timing=inference_pb2.Timing(queue_ms=0.5, ttft_ms=1.5, total_ms=2.5),
                prefill_worker="prefill-0",
                decode_worker="decode-0",
            )  # fmt: skip

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.tokenized.append(request)
        return inference_pb2.TokenizeResponse(token_ids=map(ord, request.text), max_model_len=1000)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(self, request: Any, context: Any) -> Any:
        model = inference_pb2.Model(name="echo", max_model_len=1000, vocab_size=1000, ready=True)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetStatus(self, request: Any, context: Any) -> Any:
        info = types_pb2.WorkerInfo(
            worker_id="decode-0", role=types_pb2.WORKER_ROLE_DECODE, endpoint="127.0.0.1:9", model="echo", num_blocks=64
        )
        load = types_pb2.WorkerLoad(num_running=2, num_free_blocks=60)
        worker = admin_pb2.WorkerStatus(info=info, load=load, alive=True)
        return admin_pb2.GetStatusResponse(
            process="router", version="0.1.0", workers=[worker], index_state="connected", num_indexed_blocks=12
        )


@contextmanager
def running_stub(security: Security = rpc.PLAINTEXT) -> Iterator[tuple[str, StubRouter]]:
    """(target, servicer) of a stub that runs on an event loop in a thread of its own."""
    started: Future[tuple[str, StubRouter]] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        router = StubRouter()
        server = rpc.build_server(security=security)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(router, server)
        rpc.add_health_and_reflection(server, SERVICES)
        port = rpc.bind(server, "127.0.0.1", 0, security)
        await server.start()
        # By name, since certificates are made for it.
        started.set_result((f"localhost:{port}", router))
        await stop.wait()
        await server.stop(None)

    thread = Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield started.result(timeout=10)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()

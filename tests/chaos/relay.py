"""A man in the middle of gRPC: passes whole messages of every RPC on, and may drop, repeat, hold or change them.

Bytes of a TCP connection cannot be dropped or repeated without breaking HTTP/2 as a whole (`proxy.py` does what a
network can do to a connection); what a lost, late or repeated *message* does is shown here.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

_NO_DEADLINE = 1e6  # seconds; grpc says a very large number
NUM_THREADS = 48  # each RPC that runs has one
Pass = Iterable[bytes]
# (call, response) -> what goes on in its place. It may wait: only its own call waits with it.
ResponseFilter = Callable[["Call", bytes], Pass]


@dataclass
class Call:
    """One RPC: its short method name, its (first) request, the responses that the target gave so far."""

    method: str
    request: bytes
    num_responses: int = 0


class Lost(Exception):
    """The rest of this call never arrives: its caller waits in vain."""


class Refused(Exception):
    """The call ends here with a status of our own."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Relay:
    """Listens on 127.0.0.1:`port` and passes every RPC to `target` (host:port, set later).

    `on_response` sees each response; `calls` has every RPC that was made, oldest first.
    """

    def __init__(self) -> None:
        self.target = ""
        self.calls: list[Call] = []
        self.on_response: ResponseFilter = _pass_on
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closing = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="chaos-relay"),
            options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers((_Everything(self),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def reset(self) -> None:
        """Everything passes again."""
        self.on_response = _pass_on
        self.calls = []

    def close(self) -> None:
        self._closing.set()
        self._server.stop(None).wait()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def pass_on(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One RPC of any kind: on the wire a single message is a stream of one."""
        with self._lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(
                    self.target,
                    options=[("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 500)],
                )
        call = Call(method.rsplit("/", 1)[1], b"")

        def noted() -> Iterator[bytes]:
            for request in requests:
                if not call.request:
                    call.request = request
                    self.calls.append(call)
                yield request

        left = context.time_remaining()
        far = self._channel.stream_stream(method)(noted(), timeout=left if left < _NO_DEADLINE else None)
        context.add_callback(far.cancel)
        try:
            for response in far:
                call.num_responses += 1
                yield from self.on_response(call, response)
            context.set_trailing_metadata(far.trailing_metadata() or ())
        except Lost:
            while context.is_active() and not self._closing.wait(0.02):
                pass
        except Refused as refusal:
            far.cancel()
            context.abort(refusal.code, refusal.details)
        except grpc.RpcError as error:
            failed: Any = error
            context.set_trailing_metadata(failed.trailing_metadata() or ())
            context.abort(failed.code(), failed.details())


class _Everything(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._relay.pass_on(method, requests, context)
        )


def _pass_on(call: Call, response: bytes) -> Pass:
    return (response,)

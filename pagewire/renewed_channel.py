"""A channel that lives longer than its certificates: calls made after a change go over a new connection."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc


class _Connection:
    """One real channel and the number of calls on it."""

    def __init__(self, channel: grpc.aio.Channel, key: object) -> None:
        self.channel = channel
        self.key = key
        self.num_calls = 0
        self.methods: dict[tuple[str, str], Any] = {}


class RenewedChannel(grpc.aio.Channel):
    """Acts as the channel of `open`, which is opened anew when `key` gives another object.

    What runs goes on where it began (TLS looks at certificates when it connects); an old connection is closed with its
    last call. Use it on the event loop that made it.
    """

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], key: Callable[[], object]) -> None:
        self._open = open_channel
        self._key = key
        self._now = _Connection(open_channel(), key())
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._old: set[_Connection] = set()

    def _connection(self) -> _Connection:
        if (key := self._key()) is not self._now.key and not self._is_closed:
            old, self._now = self._now, _Connection(self._open(), key)
            self._old.add(old)
            self._close_if_idle(old)
        return self._now

    def _close_if_idle(self, connection: _Connection) -> None:
        if connection in self._old and not connection.num_calls:
            self._old.discard(connection)
            task = asyncio.get_running_loop().create_task(connection.channel.close(), name="close old channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _method(self, kind: str, path: str, *codecs: Any, **options: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            connection = self._connection()
            method = connection.methods.get((kind, path))
            if method is None:
                method = getattr(connection.channel, kind)(path, *codecs, **options)
                connection.methods[kind, path] = method
            running = method(*args, **kwargs)
            connection.num_calls += 1

            def done(_: object) -> None:
                connection.num_calls -= 1
                self._close_if_idle(connection)

            running.add_done_callback(done)
            return running

        return call

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._method("unary_unary", method, *codecs, **options)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._method("unary_stream", method, *codecs, **options)

    def stream_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._method("stream_unary", method, *codecs, **options)

    def stream_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._method("stream_stream", method, *codecs, **options)

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        old, self._old = self._old, set()
        await asyncio.gather(*(each.channel.close(grace) for each in (self._now, *old)), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._connection().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._now.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._connection().channel.channel_ready()

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

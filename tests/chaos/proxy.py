"""A TCP proxy that stands in the way: it delays, freezes and cuts what passes. Runs on a thread of its own."""

import asyncio
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Proxy:
    """Listens on 127.0.0.1:`port` (known from the start) and passes everything to `target` (host:port, set later).

    `delay` seconds are waited before each piece of at most `piece` bytes goes on, in both directions; while `frozen`
    nothing passes; `cut` breaks every connection, and with `closed` new ones break at once.
    """

    def __init__(self, piece: int = 1 << 16) -> None:
        self.target = ""
        self.delay = 0.0
        self.num_bytes = 0
        self.closed = False
        self._piece = piece
        self._loop = asyncio.new_event_loop()
        self._passable = asyncio.Event()
        self._passable.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy")
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._passable.clear)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._passable.set)

    def cut(self) -> None:
        """Breaks every connection with a reset."""

        async def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._call(abort())

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _call(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
            return
        host, port = self.target.rsplit(":", 1)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        ends = (writer, far_writer)
        self._writers.update(ends)
        ways = [
            asyncio.ensure_future(self._pass(reader, far_writer)),
            asyncio.ensure_future(self._pass(far_reader, writer)),
        ]
        try:
            # At the end of the proxy this task is cancelled, which asyncio's server takes for an error.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before anything is awaited: the proxy may end at this moment too.
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(self._piece):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._passable.wait()
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()

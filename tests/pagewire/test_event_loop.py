"""The loop takes grpc.aio's wake-ups together, and still knows grpc.aio's reader when it sees it."""

import asyncio
import socket

import grpc

from pagewire import event_loop


class PollerCompletionQueue:
    """Queues and wakes as grpc.aio's does: a byte for each event, one byte read for all that are queued."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.queued = 0
        self.taken: list[int] = []

    def add(self, number: int) -> None:
        for _ in range(number):
            self.queued += 1
            self.writer.send(b"1")

    def handle_events(self) -> None:
        self.reader.recv(1)
        self.taken.append(self.queued)
        self.queued = 0


def test_events_that_wait_together_cost_one_turn() -> None:
    async def main() -> list[int]:
        queue = PollerCompletionQueue()
        loop = asyncio.get_running_loop()
        loop.add_reader(queue.reader, queue.handle_events)
        for number in (1, 5, 32):
            queue.add(number)
            for _ in range(5):
                await asyncio.sleep(0)
        loop.remove_reader(queue.reader)
        queue.reader.close()
        queue.writer.close()
        return queue.taken

    assert event_loop.run(main()) == [1, 5, 32]


def test_the_end_of_the_stream_reaches_the_reader() -> None:
    async def main() -> list[int]:
        queue = PollerCompletionQueue()
        queue.writer.close()
        event_loop._after_spare_bytes(queue.reader, queue.handle_events)
        queue.reader.close()
        return queue.taken

    assert event_loop.run(main()) == [0]


def test_other_readers_are_left_alone() -> None:
    async def main() -> bytes:
        reader, writer = socket.socketpair()
        got = bytearray()
        loop = asyncio.get_running_loop()
        loop.add_reader(reader, lambda: got.extend(reader.recv(1)))
        writer.send(b"abc")
        for _ in range(5):
            await asyncio.sleep(0)
        loop.remove_reader(reader)
        reader.close()
        writer.close()
        return bytes(got)

    assert event_loop.run(main()) == b"abc"


def test_grpcs_reader_is_recognized() -> None:
    async def main() -> list[object]:
        server = grpc.aio.server()
        loop: object = asyncio.get_running_loop()
        readers = [key.data[0] for key in loop._selector.get_map().values()]  # type: ignore[attr-defined]
        await server.stop(None)
        return [handle._callback for handle in readers if handle is not None]

    assert event_loop._after_spare_bytes in event_loop.run(main())

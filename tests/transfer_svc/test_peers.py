"""What a peer remembers when its answers cross with its own calls."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from pagewire.errors import Unavailable
from transfer_svc.peer import Peer

TICKET = b"t" * 16


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def test_a_refused_heartbeat_does_not_forget_a_newer_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ticket was attached anew while the heartbeat with the old epoch was on its way."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        peer = Peer("127.0.0.1:1", channel, None, in_thread, None)
        sent: list[Sequence[tuple[bytes, int]]] = []

        async def refuse(held: Sequence[tuple[bytes, int]], timeout: float) -> list[bytes]:
            sent.append(held)
            if len(sent) == 1:
                peer.held[TICKET] = 2
            return [TICKET]

        monkeypatch.setattr(peer.client, "heartbeat", refuse)
        peer.held[TICKET] = 1
        await peer.heartbeat()
        assert peer.held == {TICKET: 2}
        await peer.heartbeat()
        assert peer.held == {}
        assert sent == [[(TICKET, 1)], [(TICKET, 2)]]


async def test_giving_up_twice_is_giving_up_once() -> None:
    """The body may need a while to end: a thread that copies is waited for."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        peer = Peer("127.0.0.1:1", channel, None, in_thread, None)

        async def body() -> None:
            async with peer.while_it_answers():
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.05)

        running = asyncio.create_task(body())
        await asyncio.sleep(0)
        peer.give_up(hangs=True)
        await asyncio.sleep(0.02)
        peer.give_up(hangs=False)
        with pytest.raises(Unavailable, match="does not answer"):
            await running

"""SubscribeKvEvents: a journal as a stream, with the load on every message and a heartbeat when nothing changes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from pagewire.errors import PagewireError
from pagewire.foreign.smg import common_pb2 as pb
from pagewire.kv_journal import Batch, Block, JournalGap
from pagewire.vllm_engine.kv_events import batch_to_proto, snapshot_to_proto
from pagewire.vllm_engine.load import Load

HEARTBEAT_SECONDS = 1.0
# What changes within this time travels together.
_COALESCE_SECONDS = 0.02


class Journal(Protocol):
    """`engine.kv_cache.KvCache`, which this package cannot import, and the router's relay."""

    def journal_since(self, seq: int) -> list[Batch]: ...
    def journal_snapshot(self) -> tuple[int, list[Block]]: ...


class KvEventStreams:
    """All followers of one journal. `wait_for_change` returns when it may have grown."""

    def __init__(
        self, journal: Journal, wait_for_change: Callable[[], Awaitable[None]], load: Callable[[], Load]
    ) -> None:
        self._journal = journal
        self._wait_for_change = wait_for_change
        self._load = load
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends the streams, which would never end by themselves."""
        self._closed.set()

    async def follow(self, cursor: int) -> AsyncGenerator[pb.KvEventBatch]:
        """Everything after that batch, or from a snapshot on if it is 0.

        OUT_OF_RANGE if the cursor cannot be continued, DATA_LOSS for one who reads too slowly: both start over.
        """
        num_sent = 0
        if cursor == 0:
            cursor, blocks = self._journal.journal_snapshot()
            for message in snapshot_to_proto(cursor, blocks):
                num_sent += 1
                yield self._stamped(message, num_sent)
        sent_at = time.monotonic()
        while not self._closed.is_set():
            # Asked before the journal is, so that no change falls between.
            changing = asyncio.ensure_future(self._wait_for_change())
            try:
                for batch in self._since(cursor, is_live=num_sent > 0):
                    cursor, num_sent, sent_at = batch.seq, num_sent + 1, time.monotonic()
                    yield self._stamped(batch_to_proto(batch), num_sent)
                await self._wait(changing, sent_at + HEARTBEAT_SECONDS)
            finally:
                changing.cancel()
                await asyncio.gather(changing, return_exceptions=True)
            if time.monotonic() >= sent_at + HEARTBEAT_SECONDS:
                num_sent, sent_at = num_sent + 1, time.monotonic()
                beat = pb.KvEventBatch(sequence_number=cursor, dp_rank=0)
                beat.load.load_only = True
                yield self._stamped(beat, num_sent)

    def _since(self, cursor: int, *, is_live: bool) -> Sequence[Batch]:
        try:
            return self._journal.journal_since(cursor)
        except JournalGap as gap:
            code = grpc.StatusCode.DATA_LOSS if is_live else grpc.StatusCode.OUT_OF_RANGE
            raise PagewireError(f"{gap}; start from 0 for a snapshot", code=code) from None

    async def _wait(self, changing: "asyncio.Future[None]", until: float) -> None:
        """Until something may have changed, a heartbeat is due, or all is over."""
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            left = max(0.0, until - time.monotonic())
            done, _ = await asyncio.wait((changing, closing), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if changing in done:
                await asyncio.sleep(_COALESCE_SECONDS)
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    def _stamped(self, message: pb.KvEventBatch, sample: int) -> pb.KvEventBatch:
        load = self._load()
        message.timestamp = time.time()
        message.load.running_requests = load.num_running
        message.load.waiting_requests = load.num_waiting
        message.load.waiting_uncached_tokens = load.num_waiting_tokens
        message.load.token_usage = message.load.active_token_usage = load.kv_usage
        message.load.max_running_requests = load.max_running
        message.load.num_used_tokens = load.num_used_tokens
        message.load.max_total_num_tokens = load.num_pool_tokens
        message.load.sample = sample
        return message

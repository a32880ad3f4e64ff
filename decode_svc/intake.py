"""One request's KV on its way from a prefill worker into this pool, and what the engine is to make of it.

match      the leading blocks that this worker has are kept; the rest is pulled
attach     takes the ticket over; from now on heartbeats keep its lease
pull       blocks come while prefill still runs (see `prefix.py`), then the first tokens
adopt      the engine goes on behind them; if the transfer failed, it computes the rest behind what has come
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from decode_svc.choices import merge_first_tokens, shared_token_ids
from engine.admission import open_branches
from engine.host import EngineHost
from engine.request import EngineRequest
from engine.transfer.frames import FrameError
from engine.transfer.plane import CorruptBlock, PlaneUnavailable, StaleBlock
from pagewire.errors import KvLoadFailed, PagewireError
from pagewire.trace import log_fields
from pagewire.worker_metrics import WorkerMetrics
from pagewire.worker_view import PrefixSource
from transfer_svc.client import Attached, PulledEnd
from transfer_svc.fetch import PrefixFetcher
from transfer_svc.peer import Peer
from transfer_svc.peers import PeerTable
from transfer_svc.prefix import RingStarved, VerifiedPrefix, WrongTokens
from transfer_svc.pull import pull_into
from transfer_svc.reservations import PoolFull, Preempted, Reservation, Reservations

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
# Before the connection to the peer is tried again; doubled each time.
RETRY_SECONDS = 0.2
# Labels of the failure metric.
_BAD_BLOCKS = {CorruptBlock: "checksum", StaleBlock: "generation", FrameError: "frame"}
_REASONS = {grpc.StatusCode.FAILED_PRECONDITION: "epoch", grpc.StatusCode.NOT_FOUND: "ticket"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's KV comes from; the plain form of TransferSource."""

    endpoint: str
    worker_id: str
    incarnation: int
    ticket: bytes


class TransferFailed(Exception):
    """The KV does not come. `reason` is the metric's label; `may_recover`: the ticket may have survived."""

    def __init__(self, reason: str, message: str, *, may_recover: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.may_recover = may_recover


class Intake:
    """The transfer of one request. Its blocks are given back by `release` unless the engine took them.

    `spawn` runs what has to happen after the end, however that came (giving the ticket back). With `fail_without_kv` a
    transfer that failed for good is the end of the request here, else the rest is computed.
    """

    def __init__(
        self,
        request: EngineRequest,
        source: Source,
        host: EngineHost[Any],
        peers: PeerTable,
        reservations: Reservations,
        metrics: WorkerMetrics,
        max_model_len: int,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        fetcher: PrefixFetcher,
        prefix_sources: Sequence[PrefixSource],
        *,
        fail_without_kv: bool = False,
    ) -> None:
        self._request = request
        self._source = source
        self._peers = peers
        self._reservations = reservations
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._vocab_size = host.engine.scheduler.config.vocab_size
        self._spawn = spawn
        self._fetcher = fetcher
        self._prefix_sources = prefix_sources
        self._fail_without_kv = fail_without_kv
        self._num_retries = 0
        self._peer: Peer | None = None
        self._attached: Attached | None = None
        self._prefix = VerifiedPrefix(shared_token_ids(request), host, reservations, metrics)

    async def match(self) -> int:
        """Takes the leading blocks that are here already, in a tier too; returns their tokens."""
        await self._prefix.match(self._request.cache_salt, self._request.adapter)
        self._fetcher.count_loaded(self._prefix)
        return self._prefix.num_tokens

    @property
    def num_loaded_tokens(self) -> int:
        """Of the tokens that `match` has found those that came from a tier."""
        return self._prefix.num_loaded_tokens

    async def receive(self) -> EngineRequest:
        """What the engine is to run; the references on adopted blocks are in it.

        It needs no engine if its choices are all finished. Raises PagewireError if the two workers do not fit, and
        KvLoadFailed if that is the policy.
        """
        request = self._request
        try:
            end = await self._transfer()
            self._check_first_tokens(end)
            request = merge_first_tokens(request, end.first_tokens, self._max_model_len)
        except TransferFailed as error:
            if not self._fail_without_kv:
                await self._fetch_rest()
            self._give_up(error)
        if not open_branches(request):
            return request
        return replace(request, adopted=self._prefix.adopt(len(shared_token_ids(request))))

    async def _fetch_rest(self) -> None:
        """Another worker may have what is missing now."""
        request = self._request
        num_tokens = await self._fetcher.fetch(
            request.request_id, shared_token_ids(request), request.cache_salt, self._prefix_sources, request.adapter
        )
        if num_tokens:
            self._prefix.match_further()

    def release(self) -> None:
        """Gives back every block that the engine did not take."""
        self._prefix.release()

    def _check_first_tokens(self, end: PulledEnd) -> None:
        """The rest of the request was looked at when it came."""
        for token in end.first_tokens:
            if self._vocab_size and token.token_id >= self._vocab_size:
                message = f"first token {token.token_id} is outside the vocabulary of {self._vocab_size}"
                raise TransferFailed("frame", message)

    def _give_up(self, error: TransferFailed) -> None:
        """By policy: the rest is computed here, or (KvLoadFailed) the router has to find another way."""
        num_tokens, num_shared = self._prefix.num_tokens, len(shared_token_ids(self._request))
        self._metrics.transfer_failure(error.reason)
        failed = f"KV from {self._source.endpoint} failed after {num_tokens} of {num_shared} tokens"
        what_now = "the request is given back" if self._fail_without_kv else "the rest is computed here"
        self._warn(f"{failed}, {what_now}: {error}")
        if self._fail_without_kv:
            self._metrics.transfers_failed.inc()
            raise KvLoadFailed(f"{failed}: {error}")
        self._metrics.recomputed_tokens.inc(max(0, num_shared - num_tokens))
        source = self._source
        giving_back = self._peers.give_back(source.endpoint, source.incarnation, source.ticket)
        self._spawn(giving_back, "ticket-give-back")

    def _warn(self, message: str) -> None:
        request = self._request
        fields = log_fields(request.request_id, request.trace_id, ticket=self._source.ticket[:4].hex())
        logger.warning("request %s: %s", request.request_id, message, extra=fields)

    def _retry(self, what: str, error: Exception) -> None:
        self._num_retries += 1
        self._metrics.transfer_retries.inc()
        self._warn(f"{what}: {error}")

    async def _transfer(self) -> PulledEnd:
        """From the first block that is missing, over and over while that may help."""
        mine = self._reservations.open(self._request.tenant, len(shared_token_ids(self._request)))
        try:
            while True:
                try:
                    return await self._transfer_once(mine)
                except TransferFailed as error:
                    if not error.may_recover or self._num_retries >= MAX_RETRIES:
                        raise
                    pause = RETRY_SECONDS * 2**self._num_retries
                    self._retry(f"the connection to {self._source.endpoint} broke, pulling again", error)
                self._prefix.drop_part()
                await asyncio.sleep(pause)
        finally:
            self._reservations.close(mine)
            if self._peer is not None:
                self._spawn(self._give_back(self._peer, self._attached), "ticket-release")

    async def _transfer_once(self, mine: Reservation) -> PulledEnd:
        started_at = asyncio.get_running_loop().time()
        try:
            peer = await self._peers.get(self._source.endpoint, self._source.incarnation)
        except PagewireError as error:
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                raise
            raise TransferFailed("peer", error.message, may_recover=_is_lost(error)) from None
        self._go_on_with(peer)
        try:
            async with peer.while_it_answers():
                self._attached = await peer.attach(self._source.ticket)
                self._prefix.take_over(self._attached.num_tokens)
                end = await self._pull_until_done(peer, self._attached, mine)
        except PagewireError as error:
            reason, may_recover = _REASONS.get(error.code, "peer"), _is_lost(error) and not peer.hangs
            raise TransferFailed(reason, error.message, may_recover=may_recover) from None
        self._observe(started_at, end)
        return end

    def _go_on_with(self, peer: Peer) -> None:
        if self._peer is not None:
            self._peer.held.pop(self._source.ticket, None)
            self._peers.put_back(self._peer)
        self._peer = peer

    async def _give_back(self, peer: Peer, attached: Attached | None) -> None:
        try:
            if attached is not None:
                await peer.release(self._source.ticket, attached.epoch)
        finally:
            self._peers.put_back(peer)

    async def _pull_until_done(self, peer: Peer, attached: Attached, mine: Reservation) -> PulledEnd:
        """Starts the pull over, from the first block that is missing, whenever that can help."""
        is_starved = False
        try:
            while True:
                plane = peer.plane
                try:
                    async with mine.preemptible():
                        if is_starved:
                            await self._reservations.wait_for_room(mine)
                        return await pull_into(self._prefix, peer, self._source.ticket, attached.epoch, mine)
                except Preempted:
                    self._prefix.release()
                    await self._reservations.wait_for_turn(mine)
                    self._prefix.match_again()
                except RingStarved:
                    is_starved = True
                except PlaneUnavailable as error:
                    await peer.demote(plane, str(error))
                except (CorruptBlock, StaleBlock, FrameError) as error:
                    reason = _BAD_BLOCKS[type(error)]
                    if self._num_retries >= MAX_RETRIES:
                        raise TransferFailed(reason, str(error)) from None
                    self._metrics.transfer_failure(reason)
                    self._retry("a bad block, pulling it again", error)
                self._prefix.drop_part()
        except PoolFull as error:
            raise TransferFailed("pool", str(error)) from None
        except WrongTokens as error:
            raise TransferFailed("key", str(error)) from None

    def _observe(self, started_at: float, end: PulledEnd) -> None:
        now = asyncio.get_running_loop().time()
        self._metrics.transfer_seconds.observe(now - started_at)
        if end.seconds_since_prefill is not None:
            prefill_ended_at = now - end.seconds_since_prefill
            overlapped = sum(arrived_at < prefill_ended_at for arrived_at in self._prefix.arrivals)
            self._metrics.transfer_overlap_blocks.inc(overlapped)


def _is_lost(error: PagewireError) -> bool:
    """The connection broke; the peer need not have died with it."""
    return error.code is grpc.StatusCode.UNAVAILABLE

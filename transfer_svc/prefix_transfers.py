"""One offer taken up: a ticket lent by the peer, the pull under it, the ticket given back, the link measured."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from engine.transfer.frames import FrameError
from engine.transfer.plane import CorruptBlock, PlaneUnavailable, StaleBlock
from pagewire.errors import PagewireError
from pagewire.fetch_metrics import FetchMetrics
from transfer_svc.client import AttachedPrefix
from transfer_svc.fetch_offers import Offer
from transfer_svc.peer import RPC_TIMEOUT, Peer
from transfer_svc.peers import PeerTable
from transfer_svc.prefix import RingStarved, VerifiedPrefix, WrongTokens
from transfer_svc.pull import pull_into
from transfer_svc.rates import Rates
from transfer_svc.reservations import PoolFull, Preempted, Reservations

logger = logging.getLogger(__name__)

_MAX_PULLS = 3
_REASONS = {
    grpc.StatusCode.NOT_FOUND: "gone",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.FAILED_PRECONDITION: "unfit",
}


class FetchFailed(Exception):
    """This source brings no more. `reason` is the metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PrefixTransfers:
    """`spawn` runs what has to happen after the end of a transfer, however that came (giving the ticket back)."""

    def __init__(
        self,
        peers: PeerTable,
        reservations: Reservations,
        rates: Rates,
        metrics: FetchMetrics,
        block_size: int,
        block_bytes: int,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._peers = peers
        self._reservations = reservations
        self._rates = rates
        self._metrics = metrics
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._spawn = spawn
        self._giving_back: set[asyncio.Task[None]] = set()

    async def all_given_back(self) -> None:
        """The peers have the tickets of the transfers that have ended until now, or couldn't be told."""
        if self._giving_back:
            await asyncio.wait(set(self._giving_back))

    async def bring(self, prefix: VerifiedPrefix, tokens: Sequence[int], offer: Offer, *, dear: bool) -> None:
        """The blocks of `tokens`, all that the offer is about. Raises FetchFailed.

        What came is counted, and measured, whatever happens. `dear`: the peer is to load them whatever that costs.
        """
        source, clock = offer.source, asyncio.get_running_loop().time
        started_at, num_before, num_tokens_before = clock(), len(prefix.arrivals), prefix.num_arrived_tokens
        try:
            peer = await self._peers.get(source.endpoint, source.incarnation)
        except PagewireError as error:
            raise FetchFailed(_REASONS.get(error.code, "peer"), error.message) from None
        connected_at = clock()
        patience = max(RPC_TIMEOUT, offer.deadline) if dear else RPC_TIMEOUT  # a disk may have much to read
        asking = asyncio.ensure_future(
            peer.attach_prefix(prefix.keys[: offer.stop], tokens, prefix.num_blocks, always=dear, timeout=patience)
        )
        is_unused = False
        try:
            async with peer.while_it_answers():
                attached = await asyncio.shield(asking)
                prefix.aim(attached.num_blocks)
                prefix.cover(attached.num_blocks * self._block_size)
                await self._pull(prefix, peer, attached)
        except PagewireError as error:
            is_unused = True  # an answer that brings nothing says nothing of the link
            raise FetchFailed(_REASONS.get(error.code, "peer"), error.message) from None
        finally:
            task = self._spawn(self._give_back(peer, asking), "prefix-release")
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)
            arrivals = prefix.arrivals[num_before:]
            if arrivals or not is_unused:
                num_tokens = prefix.num_arrived_tokens - num_tokens_before
                self._observe(offer, peer, arrivals, num_tokens, connected_at, clock())
        logger.debug("%d blocks from %s in %.3f s", len(arrivals), source.worker_id, clock() - started_at)

    async def _pull(self, prefix: VerifiedPrefix, peer: Peer, attached: AttachedPrefix) -> None:
        """It never waits for a free block, and makes room for transfers that do."""
        mine = self._reservations.open(timeout=0.0)
        try:
            for number in range(1, _MAX_PULLS + 1):
                plane = peer.plane
                try:
                    async with mine.preemptible():
                        await pull_into(prefix, peer, attached.ticket, attached.epoch, mine)
                    return
                except PlaneUnavailable as error:
                    await peer.demote(plane, str(error))
                except (CorruptBlock, StaleBlock, FrameError) as error:
                    if number == _MAX_PULLS:
                        raise FetchFailed("block", str(error)) from None
                    self._metrics.failed("block")
                    logger.warning("a bad block from %s, fetching it again: %s", peer.endpoint, error)
                prefix.drop_part()
            raise FetchFailed("peer", "no plane works")
        except (PoolFull, Preempted, RingStarved) as error:
            raise FetchFailed("pool", str(error) or "own requests need the blocks") from None
        except WrongTokens as error:
            raise FetchFailed("key", str(error)) from None
        finally:
            self._reservations.close(mine)

    async def _give_back(self, peer: Peer, asking: "asyncio.Future[AttachedPrefix]") -> None:
        """Also if the answer was not waited for: then there may be a ticket all the same."""
        try:
            attached = await asking
            await peer.release(attached.ticket, attached.epoch)
        except PagewireError as error:
            logger.debug("nothing to give back to %s: %s", peer.endpoint, error.message)
        finally:
            self._peers.put_back(peer)

    def _observe(
        self,
        offer: Offer,
        peer: Peer,
        arrivals: Sequence[float],
        num_tokens: int,
        started_at: float,
        now: float,
    ) -> None:
        num_blocks, size = len(arrivals), self._block_bytes
        first_at = arrivals[0] if arrivals else now
        num_first = sum(arrived_at == first_at for arrived_at in arrivals)
        last_at = arrivals[-1] if arrivals else now
        self._rates.link(offer.source.endpoint, peer.plane, from_tier=offer.from_tier).observe(
            num_blocks * size, last_at - started_at, num_first * size, first_at - started_at
        )
        if num_blocks:
            self._metrics.fetched(offer.source.role, num_blocks, num_tokens, num_blocks * size)

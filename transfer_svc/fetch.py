"""Brings a prompt's leading blocks from workers that have them cached, when that is faster than to compute them.

    match      what is here already; another request may be fetching the same: then its end is waited for
    decide     the source with the largest saving, by measured rates (`rates.py`); none, or no room: compute
    pull       under a lent ticket, within a deadline of the estimate; every block is verified and cached as it comes
    give up    whatever goes wrong: what has come is cached, the next source is tried, the engine computes the rest

The request goes to the engine afterwards and finds the blocks in the cache, like any others.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from engine.host import EngineHost
from engine.request import AdapterId, StepOutput
from engine.transfer.frames import FrameError
from engine.transfer.plane import CorruptBlock, PlaneUnavailable, StaleBlock, block_bytes
from pagewire.errors import PagewireError
from pagewire.fetch_metrics import FetchMetrics
from pagewire.metrics import WorkerMetrics
from pagewire.worker_view import PrefixSource
from transfer_svc.client import AttachedPrefix
from transfer_svc.peer import RPC_TIMEOUT, Peer
from transfer_svc.peers import PeerTable
from transfer_svc.prefix import RingStarved, VerifiedPrefix, WrongTokens
from transfer_svc.pull import pull_into
from transfer_svc.rates import Rates
from transfer_svc.reservations import PoolFull, Preempted, Reservations

logger = logging.getLogger(__name__)

_MAX_PULLS = 3
_MAX_FLIGHTS = 3
_MAX_AVOIDED = 1024
_REASONS = {
    grpc.StatusCode.NOT_FOUND: "gone",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.FAILED_PRECONDITION: "unfit",
}
# After one of these the source is left alone for a while; the others say nothing about the next fetch.
_FAULTS = frozenset({"peer", "silent", "unfit", "block", "key"})


class _Failed(Exception):
    """This source brings no more. `reason` is the metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """When to fetch, and how long it may take: `slack` times the estimate, but at least `min_deadline` seconds."""

    mode: Literal["auto", "always", "off"] = "auto"
    min_tokens: int = 64
    min_deadline: float = 1.0
    slack: float = 4.0
    avoid_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a source can save: it is to bring the blocks up to `stop` within `deadline` seconds.

    `from_tier`: it has to load some of them first.
    """

    source: PrefixSource
    stop: int
    saving: float
    deadline: float
    from_tier: bool


class PrefixFetcher:
    """Lives on the worker's event loop. `num_lacking`: blocks that the worker's own requests lack now.

    `spawn` runs what has to happen after the end of a fetch, however that came (giving the ticket back).
    """

    def __init__(
        self,
        host: EngineHost[Any],
        peers: PeerTable,
        reservations: Reservations,
        settings: FetchSettings,
        worker_metrics: WorkerMetrics,
        metrics: FetchMetrics,
        num_lacking: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.rates = Rates()
        self.settings = settings
        self.metrics = metrics
        self._host = host
        self._cache = host.kv_cache
        self._block_bytes = block_bytes(host.memory)
        self._peers = peers
        self._reservations = reservations
        self._worker_metrics = worker_metrics
        self._num_lacking = num_lacking
        self._spawn = spawn
        self._flights: dict[bytes, asyncio.Event] = {}  # by the key of the first block that is being fetched
        self._avoided: dict[tuple[str, int], float] = {}  # until when
        if settings.mode != "off" and self._cache.enable_caching and not self._keeps_what_comes:
            logger.warning("nothing is fetched from other workers: every layer of the model has a sliding window")

    def observe_step(self, step: StepOutput) -> None:
        """Learns what computing costs, and counts what tiers brought."""
        self.metrics.computed_tokens.inc(step.num_prefill_tokens)
        for _, tier, num_tokens in step.loaded:
            self.metrics.loaded(tier, num_tokens)
        self.rates.prefill.observe(step.num_prefill_tokens, step.seconds)

    def wants(self, sources: Sequence[PrefixSource]) -> bool:
        """False if `fetch` would do nothing."""
        longest = max((source.num_blocks for source in sources), default=0)
        is_on = self.settings.mode != "off" and self._cache.enable_caching
        return is_on and self._keeps_what_comes and longest * self._cache.block_size >= self.settings.min_tokens

    def num_passed_over(self, sources: Sequence[PrefixSource], num_tokens: int) -> int:
        """Of a request of so many tokens for which `fetch` is not asked: leading ones that others are said to hold."""
        size = self._cache.block_size
        longest = max((source.num_blocks for source in sources), default=0)
        return min(longest, max(0, num_tokens - 1) // size) * size

    def count_passed_over(self, num_passed_over: int, num_cached_tokens: int) -> None:
        """What of them the engine did not find here either, once it has looked."""
        if num_passed_over > num_cached_tokens:
            is_on = self.settings.mode != "off" and self._cache.enable_caching
            reason = "off" if not is_on else "short" if self._keeps_what_comes else "window"
            self.metrics.unfetched(reason, num_passed_over - num_cached_tokens)

    @property
    def _keeps_what_comes(self) -> bool:
        """Not where all layers slide: only a chain's end would come, and nobody finds it without its beginning."""
        return self._cache.groups.groups[0].window is None

    async def fetch(
        self,
        request_id: str,
        token_ids: Sequence[int],
        cache_salt: str,
        sources: Sequence[PrefixSource],
        adapter: AdapterId | None = None,
        *,
        always: bool = False,
    ) -> int:
        """Returns how many tokens it has brought into the cache, own tiers' included.

        Nothing but a cancellation is raised. The last token is computed in any case, so it is not fetched. Afterwards
        no reference and no ticket is held. `always`: somebody asks for it, whatever computing would cost.
        """
        if not (self._keeps_what_comes if always else self.wants(sources)):
            return 0
        try:
            return await self._fetch(request_id, token_ids, cache_salt, sources, adapter, always)
        except Exception:
            logger.exception("request %s: the fetch failed, the prompt is computed here", request_id)
            self.metrics.failed("bug")
            return 0

    async def _fetch(
        self,
        request_id: str,
        token_ids: Sequence[int],
        cache_salt: str,
        sources: Sequence[PrefixSource],
        adapter: AdapterId | None,
        always: bool,
    ) -> int:
        size = self._cache.block_size
        tokens = token_ids[: (len(token_ids) - 1) // size * size]
        prefix = VerifiedPrefix(tokens, self._host, self._reservations, self._worker_metrics)
        try:
            await prefix.match(cache_salt, adapter, as_hit=True, always=always)
            num_before = prefix.num_blocks
            self.count_loaded(prefix)
            await self._wait_for_flights(prefix)
            stop = min(len(prefix.keys), max((source.num_blocks for source in sources), default=0))
            if prefix.num_blocks >= stop:
                return prefix.num_loaded_tokens
            key, flight = prefix.keys[prefix.num_blocks], asyncio.Event()
            self._flights[key] = flight
            try:
                reason = await self._try_sources(request_id, prefix, tokens, list(sources), always)
            finally:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.set()
            if prefix.num_blocks < stop:
                self.metrics.unfetched(reason, (stop - prefix.num_blocks) * size)
            # A pull may have cost some of what was here, if a sliding group's blocks were evicted for it.
            return max(0, prefix.num_blocks - num_before) * size + prefix.num_loaded_tokens
        finally:
            prefix.release()

    def count_loaded(self, prefix: VerifiedPrefix) -> None:
        """Counts what came from this worker's tiers."""
        for tier, num_tokens in prefix.loaded:
            self.metrics.loaded(tier, num_tokens)

    async def _wait_for_flights(self, prefix: VerifiedPrefix) -> None:
        """Equal prompts come in bursts: the first one fetches, the others wait as long as it may take."""
        for _ in range(_MAX_FLIGHTS):
            flight = self._flights.get(prefix.keys[prefix.num_blocks]) if prefix.num_blocks < len(prefix.keys) else None
            if flight is None:
                return
            await flight.wait()
            prefix.match_further()

    async def _try_sources(
        self,
        request_id: str,
        prefix: VerifiedPrefix,
        tokens: Sequence[int],
        sources: list[PrefixSource],
        always: bool,
    ) -> str:
        """Until nothing is missing or no source is worth it; returns why there is no more."""
        failure = ""
        while True:
            offer, declined = self._best_offer(prefix, sources, always)
            if offer is None:
                if declined and not failure:
                    self.metrics.declined(declined)
                return failure or declined or "partial"
            sources.remove(offer.source)
            num_arrivals = len(prefix.arrivals)
            try:
                async with asyncio.timeout(offer.deadline):
                    await self._transfer(prefix, tokens, offer, always)
                continue
            except TimeoutError:
                is_silent = len(prefix.arrivals) == num_arrivals
                failed = _Failed("silent" if is_silent else "deadline", f"it took longer than {offer.deadline:.3f} s")
            except _Failed as error:
                failed = error
            failure = failed.reason
            prefix.fall_back()
            self._note_failure(request_id, offer.source, failed, prefix.num_tokens)
            if failure == "pool":
                return failure

    def _best_offer(
        self, prefix: VerifiedPrefix, sources: Sequence[PrefixSource], always: bool
    ) -> tuple[_Offer | None, str]:
        """The largest saving; or None and why there is none (empty: nobody has more)."""
        size, settings, here = self._cache.block_size, self.settings, prefix.num_blocks
        num_growing = self._host.load.num_running * len(self._cache.groups)
        room = self._cache.num_free - num_growing - max(0, self._num_lacking())
        now = asyncio.get_running_loop().time()
        planes = {peer.endpoint: peer.plane for peer in self._peers.connected()}
        best: _Offer | None = None
        reasons = []
        for source in sources:
            stop = min(source.num_blocks, len(prefix.keys))
            if stop <= here:
                continue
            gain = prefix.deepest(stop, room) - here
            num_bytes = prefix.num_lacking(here + gain) * self._block_bytes
            compute = self.rates.compute_seconds(gain * size)
            from_tier = here + gain > source.num_blocks - source.num_lower_blocks
            fetch = self.rates.fetch_seconds(
                source.endpoint, planes.get(source.endpoint), num_bytes, from_tier=from_tier
            )
            if self._avoided.get((source.endpoint, source.incarnation), now) > now:
                reasons.append("avoided")
            elif not always and (stop - here) * size < settings.min_tokens:
                reasons.append("short")
            elif gain * size < (1 if always else settings.min_tokens):
                reasons.append("pool")
            elif not always and settings.mode == "auto" and fetch >= compute:
                reasons.append("dearer")
            elif best is None or compute - fetch > best.saving:
                longest = settings.slack * fetch
                if not always and settings.mode == "auto":
                    longest = min(longest, compute)
                deadline = max(settings.min_deadline, longest)
                best = _Offer(source, here + gain, compute - fetch, deadline, from_tier)
        return best, reasons[0] if reasons else ""

    async def _transfer(self, prefix: VerifiedPrefix, tokens: Sequence[int], offer: _Offer, always: bool) -> None:
        """Raises _Failed. What came is counted, and measured, whatever happens."""
        source, clock = offer.source, asyncio.get_running_loop().time
        started_at, num_before, num_tokens_before = clock(), len(prefix.arrivals), prefix.num_arrived_tokens
        try:
            peer = await self._peers.get(source.endpoint, source.incarnation)
        except PagewireError as error:
            raise _Failed(_REASONS.get(error.code, "peer"), error.message) from None
        connected_at = clock()
        wanted = tokens[: offer.stop * self._cache.block_size]
        # The peer's tiers would decline by its own estimate, which is not asked for here either.
        dear = always or self.settings.mode == "always"
        patience = max(RPC_TIMEOUT, offer.deadline) if dear else RPC_TIMEOUT  # a disk may have much to read
        asking = asyncio.ensure_future(
            peer.attach_prefix(prefix.keys[: offer.stop], wanted, prefix.num_blocks, always=dear, timeout=patience)
        )
        is_unused = False
        try:
            async with peer.while_it_answers():
                attached = await asyncio.shield(asking)
                prefix.aim(attached.num_blocks)
                prefix.cover(attached.num_blocks * self._cache.block_size)
                await self._pull(prefix, peer, attached)
        except PagewireError as error:
            is_unused = True  # an answer that brings nothing says nothing of the link
            raise _Failed(_REASONS.get(error.code, "peer"), error.message) from None
        finally:
            self._spawn(self._give_back(peer, asking), "prefix-release")
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
                        raise _Failed("block", str(error)) from None
                    self.metrics.failed("block")
                    logger.warning("a bad block from %s, fetching it again: %s", peer.endpoint, error)
                prefix.drop_part()
            raise _Failed("peer", "no plane works")
        except (PoolFull, Preempted, RingStarved) as error:
            raise _Failed("pool", str(error) or "own requests need the blocks") from None
        except WrongTokens as error:
            raise _Failed("key", str(error)) from None
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
        offer: _Offer,
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
        self.rates.link(offer.source.endpoint, peer.plane, from_tier=offer.from_tier).observe(
            num_blocks * size, last_at - started_at, num_first * size, first_at - started_at
        )
        if num_blocks:
            self.metrics.fetched(offer.source.role, num_blocks, num_tokens, num_blocks * size)

    def _note_failure(self, request_id: str, source: PrefixSource, failed: _Failed, num_tokens: int) -> None:
        self.metrics.failed(failed.reason)
        logger.warning(
            "request %s: fetching from %s ended with %d tokens here (%s): %s",
            request_id,
            source.worker_id,
            num_tokens,
            failed.reason,
            failed,
        )
        if failed.reason in _FAULTS:
            self._avoided[source.endpoint, source.incarnation] = (
                asyncio.get_running_loop().time() + self.settings.avoid_seconds
            )
            if len(self._avoided) > _MAX_AVOIDED:
                del self._avoided[next(iter(self._avoided))]

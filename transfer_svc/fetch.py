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
from typing import Any

from engine.host import EngineHost
from engine.request import AdapterId, StepOutput
from engine.transfer.plane import block_bytes
from pagewire.fetch_metrics import FetchMetrics
from pagewire.worker_metrics import WorkerMetrics
from pagewire.worker_view import PrefixSource
from transfer_svc.fetch_offers import FetchSettings, Offer, Offers
from transfer_svc.peers import PeerTable
from transfer_svc.prefix import VerifiedPrefix
from transfer_svc.prefix_transfers import FetchFailed, PrefixTransfers
from transfer_svc.rates import Rates
from transfer_svc.reservations import Reservations

logger = logging.getLogger(__name__)

_MAX_FLIGHTS = 3
# After one of these the source is left alone for a while; the others say nothing about the next fetch.
_FAULTS = frozenset({"peer", "silent", "unfit", "block", "key"})


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
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self.rates = Rates()
        self.settings = settings
        self.metrics = metrics
        self._host = host
        self._cache = host.kv_cache
        self._peers = peers
        self._reservations = reservations
        self._worker_metrics = worker_metrics
        self._num_lacking = num_lacking
        sizes = self._cache.block_size, block_bytes(host.memory)
        self._offers = Offers(self.rates, *sizes)
        self._transfers = PrefixTransfers(peers, reservations, self.rates, metrics, *sizes, spawn)
        self._flights: dict[bytes, asyncio.Event] = {}  # by the key of the first block that is being fetched
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
        return min(longest * size, num_tokens // size * size, max(0, num_tokens - 1))

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

        Nothing but a cancellation is raised. Afterwards no reference is held. `always`: somebody asks for it, whatever
        computing would cost, and may want the peer to forget it then: afterwards no ticket is held either.
        """
        if not (self._keeps_what_comes if always else self.wants(sources)):
            return 0
        try:
            return await self._fetch(request_id, token_ids, cache_salt, sources, adapter, always)
        except Exception:
            logger.exception("request %s: the fetch failed, the prompt is computed here", request_id)
            self.metrics.failed("bug")
            return 0
        finally:
            if always:
                await self._transfers.all_given_back()

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
        tokens = token_ids[: self._cache.groups.longest_hit(len(token_ids)) * size]
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
                    # The peer's tiers would decline by its own estimate, which is not asked for here either.
                    dear = always or self.settings.mode == "always"
                    await self._transfers.bring(prefix, tokens[: offer.stop * self._cache.block_size], offer, dear=dear)
                continue
            except TimeoutError:
                is_silent = len(prefix.arrivals) == num_arrivals
                reason = "silent" if is_silent else "deadline"
                failed = FetchFailed(reason, f"it took longer than {offer.deadline:.3f} s")
            except FetchFailed as error:
                failed = error
            failure = failed.reason
            prefix.fall_back()
            self._note_failure(request_id, offer.source, failed, prefix.num_tokens)
            if failure == "pool":
                return failure

    def _best_offer(
        self, prefix: VerifiedPrefix, sources: Sequence[PrefixSource], always: bool
    ) -> tuple[Offer | None, str]:
        num_growing = self._host.load.num_running * len(self._cache.groups)
        return self._offers.best(
            prefix,
            sources,
            self.settings,
            room=self._cache.num_free - num_growing - max(0, self._num_lacking()),
            planes={peer.endpoint: peer.plane for peer in self._peers.connected()},
            now=asyncio.get_running_loop().time(),
            always=always,
        )

    def _note_failure(self, request_id: str, source: PrefixSource, failed: FetchFailed, num_tokens: int) -> None:
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
            self._offers.avoid(source, asyncio.get_running_loop().time() + self.settings.avoid_seconds)

"""An operator's hand on this worker's cached prefixes: look up, pin, clear, bring here (`pagewire.prefix_control`).

A pin on the device is a reference on the leading blocks, as a request has them, so it is bounded: one sequence of
`max_model_len` always fits beside all pins, and half of the pool is never pinned. In a tier it keeps up to half of the
slots from eviction. Pins end by time, by a reset or clear of what they pin, and with the process.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from engine.host import EngineHost
from engine.request import AdapterId
from engine.tiers.tier import Tier
from kvstore.block_store import StoreError
from kvstore.tier_block import Owned
from pagewire.errors import NotFound, ResourceExhausted, Unavailable
from pagewire.prefix_control import Holding, Moved, Prefix
from pagewire.worker_view import PrefixSource
from transfer_svc.fetch import PrefixFetcher
from transfer_svc.reservations import Reservations
from transfer_svc.tier_prefix import load_from_tiers


@dataclass(frozen=True, slots=True)
class _Pin:
    """References on `block_ids`, the first `depth` blocks of a chain in every KV group, until `timer` fires."""

    prefix: Prefix
    keys: tuple[bytes, ...]
    depth: int
    block_ids: tuple[int, ...]
    tiers: tuple[tuple[str, int], ...]
    timer: asyncio.TimerHandle


class WorkerPrefixes:
    """Lives on the worker's event loop."""

    def __init__(self, host: EngineHost[Any], fetcher: PrefixFetcher, reservations: Reservations) -> None:
        self._host = host
        self._cache = host.kv_cache
        self._fetcher = fetcher
        self._reservations = reservations
        self._pins: dict[bytes, _Pin] = {}  # by the key of the prompt's last full block
        self._numbers = count()

    @property
    def num_pinned_blocks(self) -> int:
        """References that pins hold on the device; a block may be in several."""
        return sum(len(pin.block_ids) for pin in self._pins.values())

    async def look_up(self, prefix: Prefix) -> Holding:
        return self._holding(await self._keys(prefix))

    async def pin(self, prefix: Prefix, ttl_seconds: int) -> Holding:
        keys = await self._keys(prefix)
        if not ttl_seconds:
            self._end(keys[-1])
            return self._holding(keys)
        depth, held = self._match(prefix, keys)
        try:
            loaded = await self._load(prefix, keys, depth)
            if self._cache.groups.is_plain:
                depth, held = depth + len(loaded), held + loaded
            elif loaded:
                loaded, held = [*held, *loaded], []
                depth, held = self._match(prefix, keys)
                self._release(loaded)
            self._end(keys[-1])
            if not self._cache.groups.is_plain and len(held) > self._most_pinned() - self.num_pinned_blocks:
                # Other pins have come. A part of the blocks would be a part of each group, and nobody's hit.
                self._release(held)
                held = []
                depth, held = self._match(prefix, keys)
            pin = self._begin(prefix, keys, depth, held, ttl_seconds)
            self._pins[keys[-1]] = pin
            held = held[len(pin.block_ids) :]
        finally:
            self._release(held)
        return self._holding(keys)

    async def clear(self, prefix: Prefix, first_block: int) -> int:
        keys = await self._keys(prefix)
        if first_block >= len(keys):
            return 0
        first = keys[first_block]
        self._end_all(lambda pin: first in pin.keys)
        num_blocks = self._cache.forget(lambda block: block.key == first)
        return num_blocks + await self._forget_below(lambda tiers: tiers.forget(first))

    async def remove_moved(self, prefix: Prefix, last_block: int) -> int:
        keys = await self._keys(prefix)
        if last_block >= len(keys):
            return 0
        self._host.flush_events()  # then the journal knows all that is cached
        first = keys[self._first_unshared(keys[: last_block + 1])]
        self._end_all(lambda pin: first in pin.keys)
        num_blocks = self._cache.forget(lambda block: block.key == first)
        return num_blocks + await self._forget_below(lambda tiers: tiers.forget(first, in_store=False))

    def _first_unshared(self, keys: Sequence[bytes]) -> int:
        """Where the end of that chain begins that nobody but those who continue its last block needs."""
        _, cached = self._cache.journal_snapshot()
        children: dict[bytes | None, set[bytes]] = {}
        for block in cached:
            children.setdefault(block.parent, set()).add(block.key)
        pinned = {key for pin in self._pins.values() if keys[-1] not in pin.keys for key in pin.keys}
        first = len(keys) - 1
        while first > 0 and keys[first - 1] not in pinned:
            parent = keys[first - 1]
            others = children.get(parent, set()).union(*(tier.children(parent) for tier in self._tiers()))
            if others - {keys[first]}:
                break
            first -= 1
        return first

    async def clear_tenant(self, cache_salt: str) -> int:
        self._end_all(lambda pin: pin.prefix.cache_salt == cache_salt)
        num_blocks = self._cache.forget(lambda block: block.cache_salt == cache_salt)
        return num_blocks + await self._forget_below(lambda tiers: tiers.clear(Owned.by_tenant(cache_salt)))

    async def clear_adapter(self, name: str) -> int:
        self._end_all(lambda pin: pin.prefix.adapter is not None and pin.prefix.adapter.name == name)
        num_blocks = self._cache.forget(lambda block: block.adapter == name)
        return num_blocks + await self._forget_below(lambda tiers: tiers.clear(Owned.by_adapter(name)))

    async def bring(self, prefix: Prefix, sources: Sequence[PrefixSource]) -> Moved:
        keys = await self._keys(prefix)
        before = self._depth(keys)
        # The fetcher may leave a prompt's last block to be computed; here every full one is wanted.
        tokens = (*prefix.token_ids, 0)
        name = f"move-{next(self._numbers)}"
        await self._fetcher.fetch(name, tokens, prefix.cache_salt, sources, _adapter(prefix), always=True)
        after = self._depth(keys)
        return Moved(after, max(0, after - before))

    def unpin_all(self) -> None:
        """Ends every pin."""
        self._end_all(lambda pin: True)

    async def _keys(self, prefix: Prefix) -> list[bytes]:
        adapter = _adapter(prefix)
        keys_for = partial(self._cache.keys_for, adapter=b"" if adapter is None else adapter.key)
        return await self._host.in_thread(keys_for, prefix.token_ids, prefix.cache_salt)

    def _match(self, prefix: Prefix, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """How many leading blocks are here, and those of every group; with several, no more than may be pinned."""
        groups, most = self._cache.groups, len(keys)
        if not groups.is_plain:
            again = self._pins.get(keys[-1])
            pinned = self.num_pinned_blocks - (0 if again is None else len(again.block_ids))
            most = groups.deepest_hit(max(0, self._most_pinned() - pinned), len(keys))
        held = self._cache.match_groups(keys[:most], prefix.token_ids)
        return held[0].end, [block_id for blocks in reversed(held) for block_id in blocks.block_ids]

    async def _load(self, prefix: Prefix, keys: Sequence[bytes], start: int) -> list[int]:
        room = min(self._reservations.num_spare, self._most_pinned() - self.num_pinned_blocks - start)
        name = "" if prefix.adapter is None else prefix.adapter.name
        found = await load_from_tiers(
            self._host,
            keys,
            prefix.token_ids,
            [start] * self._cache.groups.num_full,
            prefix.cache_salt,
            name,
            max_blocks=room,
            always=True,
        )
        return list(found.block_ids)

    def _begin(self, prefix: Prefix, keys: Sequence[bytes], depth: int, held: Sequence[int], ttl_seconds: int) -> _Pin:
        """Raises NotFound or ResourceExhausted."""
        most = max(0, self._most_pinned() - self.num_pinned_blocks)
        until = time.monotonic() + ttl_seconds
        tiers = tuple((tier.name, tier.pin(keys, until)) for tier in self._tiers())
        block_ids = tuple(held[:most])
        if not block_ids and not any(num_blocks for _, num_blocks in tiers):
            if not any(self._holding(keys).num_blocks.values()):
                raise NotFound("nothing of the prompt is cached here", reason="PREFIX_NOT_CACHED")
            raise ResourceExhausted(
                f"{self.num_pinned_blocks} blocks are pinned, at most {self._most_pinned()} of "
                f"{self._cache.num_blocks} may be: a sequence of {self._host.engine.max_model_len} tokens must fit",
                subject="kv_pin",
            )
        timer = asyncio.get_running_loop().call_later(ttl_seconds, self._end, keys[-1])
        depth = min(depth, len(block_ids)) if self._cache.groups.is_plain else depth
        return _Pin(prefix, tuple(keys), depth, block_ids, tiers, timer)

    def _most_pinned(self) -> int:
        num_blocks = self._cache.num_blocks
        return min(num_blocks // 2, num_blocks - self._cache.groups.num_pool_blocks(self._host.engine.max_model_len))

    def _end(self, name: bytes) -> None:
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        pin.timer.cancel()
        self._release(pin.block_ids)
        for tier in self._tiers():
            tier.unpin(pin.keys)
            for other in self._pins.values():  # which may share its beginning
                tier.pin(other.keys, time.monotonic() + other.timer.when() - asyncio.get_running_loop().time())

    def _end_all(self, which: Any) -> None:
        for name in [name for name, pin in self._pins.items() if which(pin)]:
            self._end(name)

    def _release(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._cache.release(block_ids)
            self._host.announce()

    async def _forget_below(self, forget: Any) -> int:
        """On a thread: a disk may have to be waited for."""
        self._host.flush_events()
        tiers = self._host.engine.tiers
        try:
            num_blocks: int = 0 if tiers is None else await self._host.in_thread(partial(forget, tiers))
        except StoreError as error:
            raise not_erased(error) from None
        finally:
            self._host.flush_events()
        return num_blocks

    def _tiers(self) -> tuple[Tier, ...]:
        return () if self._host.engine.tiers is None else self._host.engine.tiers.tiers

    def _depth(self, keys: Sequence[bytes]) -> int:
        return self._cache.hit_depth(keys)

    def _holding(self, keys: Sequence[bytes]) -> Holding:
        pin = self._pins.get(keys[-1])
        pinned = {} if pin is None else {"device": pin.depth, **dict(pin.tiers)}
        return Holding({"device": self._depth(keys)} | {t.name: t.depth(keys) for t in self._tiers()}, pinned)


def not_erased(error: StoreError) -> Unavailable:
    """Nothing of it is found here any more, but what the fleet shares, or a later process, may still find some."""
    return Unavailable(f"this worker finds its blocks no more, but not all could be erased, say it again: {error}")


def _adapter(prefix: Prefix) -> AdapterId | None:
    """As block keys have it; it need not be loaded (any more)."""
    label = prefix.adapter
    return None if label is None else AdapterId(label.name, label.digest, label.generation)

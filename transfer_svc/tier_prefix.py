"""What this worker's own tiers hold of a chain, brought into the pool before anybody else is asked."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.host import EngineHost
from engine.tiers.load import TierLoad


@dataclass(frozen=True, slots=True)
class FromTiers:
    """Blocks that were loaded, and others that the same hit needs: one reference on each is the caller's.

    With one KV group they follow those that were here. With several everything is in the cache now: look there again,
    then release them.
    """

    block_ids: tuple[int, ...] = ()
    load: TierLoad | None = None

    def num_tokens(self, num_blocks: int) -> tuple[tuple[str, int], ...]:
        """Of the first `num_blocks` blocks of the chain the tokens that were loaded, by tier."""
        return () if self.load is None else self.load.tokens_by_source(num_blocks)


async def load_from_tiers(
    host: EngineHost[Any],
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    starts: Sequence[int],
    cache_salt: str,
    adapter: str = "",
    *,
    as_runs: bool = False,
    max_blocks: int,
    always: bool = False,
) -> FromTiers:
    """Loads blocks from number `starts` of the chain on, at most `max_blocks`, and commits them.

    Only those that are cheaper to load than to compute, or `always` all. `starts`, `as_runs`: see `KvTiers.start_load`.

    The caller holds the blocks before them. When cancelled, the blocks are given back as soon as nobody fills them.
    """
    tiers = host.engine.tiers
    if tiers is None or max_blocks < 1:
        return FromTiers()
    load = tiers.start_load(keys, token_ids, starts, as_runs=as_runs, max_blocks=max_blocks, always=always)
    if load is None:
        return FromTiers()
    try:
        await asyncio.shield(asyncio.wrap_future(load.done))
    except asyncio.CancelledError:
        load.abandon()
        raise
    block_ids = tuple(load.commit(cache_salt, adapter))
    host.flush_events()
    return FromTiers(block_ids, load)

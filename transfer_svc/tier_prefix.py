"""What this worker's own tiers hold of a chain, brought into the pool before anybody else is asked."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.host import EngineHost
from engine.tiers.load import SOURCE_NAMES


@dataclass(frozen=True, slots=True)
class FromTiers:
    """Blocks that follow those that were here, one reference on each is the caller's; tokens by tier."""

    block_ids: tuple[int, ...] = ()
    num_tokens: tuple[tuple[str, int], ...] = ()


async def load_from_tiers(
    host: EngineHost[Any],
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    start: int,
    cache_salt: str,
    adapter: str = "",
    *,
    max_blocks: int,
    always: bool = False,
) -> FromTiers:
    """Loads blocks from number `start` of the chain on, at most `max_blocks`, and commits them.

    Only those that are cheaper to load than to compute, or `always` all.

    The caller holds the blocks before them. When cancelled, the blocks are given back as soon as nobody fills them.
    """
    tiers, cache = host.engine.tiers, host.kv_cache
    if tiers is None or max_blocks < 1:
        return FromTiers()
    load = tiers.start_load(keys, token_ids, start, max_blocks=max_blocks, always=always)
    if load is None:
        return FromTiers()
    try:
        await asyncio.shield(asyncio.wrap_future(load.done))
    except asyncio.CancelledError:
        load.abandon()
        raise
    size, block_ids = cache.block_size, load.block_ids
    cache.release(block_ids[load.num_loaded :])
    committed = []
    for i, block_id in enumerate(block_ids[: load.num_loaded], start):
        tokens, parent = token_ids[i * size : (i + 1) * size], keys[i - 1] if i else None
        committed.append(cache.commit(block_id, keys[i], tokens, parent, cache_salt, adapter))
    host.flush_events()
    counts = [(name, load.num_blocks_of(name) * size) for name in SOURCE_NAMES]
    return FromTiers(tuple(committed), tuple((name, num) for name, num in counts if num))

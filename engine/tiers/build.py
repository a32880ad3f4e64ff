"""The tiers that an engine's options ask for."""

import logging
from pathlib import Path

import torch

from engine.errors import EngineError
from engine.kv_cache import KvCache
from engine.memory import KvMemory
from engine.sizing import available_memory
from engine.tiers.disk_format import FILE_HEADER_BYTES, fingerprint, record_bytes
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.store_format import StoreFormat
from engine.tiers.tier import Tier
from kvstore.block_store import BlockStore
from kvstore.redis_connection import RedisTarget, RedisUrlError
from kvstore.redis_store import RedisBlockStore, stored_bytes
from kvstore.tier_book import TierBook
from kvstore.tier_chain import TierChain
from pagewire.config import EngineOptions

logger = logging.getLogger(__name__)


def build_tiers(options: EngineOptions, memory: KvMemory, cache: KvCache, numerics_class: str) -> KvTiers | None:
    """None if there are to be none. Raises EngineError for a size that holds no block or is not there."""
    tiers = []
    if options.kv_offloading_size is not None:
        slots = _host_slots(options.kv_offloading_size, memory)
        tiers.append(Tier("host", slots, TierBook(slots.num_slots, chain=TierChain(cache.groups))))
    if options.kv_disk_path is not None and options.kv_disk_size is not None:
        tiers.append(_disk_tier(options.kv_disk_path, options.kv_disk_size, memory, cache, numerics_class))
    store = None
    if options.kv_store_url is not None and options.kv_store_size is not None:
        store = _store(options.kv_store_url, options.kv_store_size, memory, cache, numerics_class)
    return KvTiers(cache, memory.io, tiers, store) if tiers or store else None


def _host_slots(num_bytes: int, memory: KvMemory) -> HostSlots:
    available, block_bytes = available_memory(), int(memory.buffer.shape[1])
    if num_bytes > available:
        raise EngineError(f"kv_offloading_size = {num_bytes} bytes: the system has {available} to give")
    if num_bytes < block_bytes:
        raise EngineError(f"kv_offloading_size = {num_bytes} bytes: one block takes {block_bytes}")
    num_slots = num_bytes // block_bytes
    logger.info("KV in host memory: %d blocks, %.1f MiB", num_slots, num_bytes / 2**20)
    return HostSlots(num_slots, block_bytes)


def _disk_tier(path: Path, num_bytes: int, memory: KvMemory, cache: KvCache, numerics_class: str) -> Tier:
    layout = memory.layout
    name = fingerprint(cache.root, layout.layout_id, numerics_class, torch.__version__)
    least = FILE_HEADER_BYTES + record_bytes(layout.block_size) + layout.block_bytes
    if num_bytes < least:
        raise EngineError(f"kv_disk_size = {num_bytes} bytes: a file with one block takes {least}")
    try:
        slots = DiskSlots(path, num_bytes, name, layout.block_size, layout.block_bytes)
        book = TierBook(slots.num_slots, chain=TierChain(cache.groups))
        num_found = slots.restore(book)
    except OSError as error:
        raise EngineError(f"kv_disk_path = {path}: {error}") from None
    found = "%d blocks, %.1f MiB, %d of them found there"
    logger.info(f"KV on disk in %s: {found}", slots.path, slots.num_slots, num_bytes / 2**20, num_found)
    return Tier("disk", slots, book)


def _store(
    url: str, num_bytes: int, memory: KvMemory, cache: KvCache, numerics_class: str
) -> tuple[BlockStore, StoreFormat]:
    layout = memory.layout
    name = fingerprint(cache.root, layout.layout_id, numerics_class, torch.__version__)
    form = StoreFormat(name, layout.block_size, layout.block_bytes)
    least = stored_bytes(form.value_bytes)
    if num_bytes < least:
        raise EngineError(f"kv_store_size = {num_bytes} bytes: one block takes {least} there")
    try:
        store = RedisBlockStore(RedisTarget.parse(url), name, num_bytes // least)
    except RedisUrlError as error:
        raise EngineError(f"kv_store_url: {error}") from None
    logger.info("KV in %s: at most %d blocks of this model, %.1f MiB", store, num_bytes // least, num_bytes / 2**20)
    return store, form

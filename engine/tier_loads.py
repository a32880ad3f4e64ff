"""The scheduler's side of the tiers: which waiting sequences have blocks on their way, and what to do when they come.

admitted, would fit ─► start ─► blocks are allocated and loaded, the sequence waits, others pass it
                                  └─ settle ─► what came is committed as if computed; the rest is computed
"""

from collections.abc import Iterable

from engine.block_tables import BlockTables
from engine.kv_cache import KvCache
from engine.sequence import Sequence
from engine.tiers.kv_tiers import KvTiers


class TierLoads:
    """At most one load for each sequence, and one for each block. Without `tiers` there are none."""

    def __init__(self, cache: KvCache, tables: BlockTables, tiers: KvTiers | None) -> None:
        self._cache = cache
        self._tables = tables
        self._tiers = tiers
        self._loading: dict[bytes, Sequence] = {}  # by the key of the first block
        self._held_up: set[Sequence] = set()

    @property
    def is_busy(self) -> bool:
        """Somebody waits for a load, which will end."""
        return bool(self._loading)

    def holds_up(self, sequence: Sequence) -> bool:
        """It waits for its load or for that of another sequence with the same prefix."""
        return sequence.load is not None or sequence in self._held_up

    def start(self, sequence: Sequence, num_spare: int) -> bool:
        """For a sequence whose table has what the device holds: True if more is on its way and it has to wait.

        `num_spare` blocks are free and nobody else's: with several KV groups what it holds stays until more has come.
        """
        if self._tiers is None:
            return False
        start, most = len(sequence.block_table), self._tables.most_cached(sequence)
        keys = sequence.keys[:most]
        self._tiers.note_use(keys[:start])
        if start < most and keys[start] in self._loading:
            self._tables.free(sequence)
            self._held_up.add(sequence)
            return True
        sequence.load = self._tiers.start_load(
            keys,
            sequence.token_ids,
            [start] * self._tiers.chain.num_full,
            max_blocks=None if self._tiers.chain.is_plain else num_spare,
            ask_store=not sequence.asked_store,
        )
        if sequence.load is not None:
            sequence.asked_store = sequence.asked_store or bool(sequence.load.rest)
            self._loading[keys[start]] = sequence
        return sequence.load is not None

    def settle(self) -> None:
        """Gives every sequence what has been loaded for it."""
        self._held_up.clear()
        for key, sequence in list(self._loading.items()):
            load = sequence.load
            if load is None or load.is_done:
                del self._loading[key]
            if load is not None and load.is_done:
                self._take(sequence)

    def waiting(self) -> Iterable[Sequence]:
        """Those whose blocks are on their way."""
        return (sequence for sequence in self._loading.values() if sequence.load is not None)

    def _take(self, sequence: Sequence) -> None:
        load, sequence.load = sequence.load, None
        if load is None:
            return
        if load.chain.is_plain:
            sequence.block_table += load.block_ids[: load.num_loaded]
            self._cache.release(load.block_ids[load.num_loaded :])
            num_blocks = len(sequence.block_table)
            self._tables.commit(sequence, num_blocks * self._cache.block_size)
            self._tables.go_on_behind(sequence, num_blocks)
            sequence.num_cached_tokens = sequence.num_computed_tokens
        else:
            adapter = "" if sequence.request.adapter is None else sequence.request.adapter.name
            landed = load.commit(sequence.request.cache_salt, adapter)
            self._tables.match_again(sequence)
            self._cache.release(landed)
        sequence.loaded_tokens = load.tokens_by_source(len(sequence.block_table))

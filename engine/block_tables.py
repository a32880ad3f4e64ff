"""Which blocks a sequence's tokens lie in: cached prefix, growth, copy-on-write, commit, fork. No policy."""

from engine.kv_cache import KvCache
from engine.request import AdoptedKv
from engine.sequence import Attempt, Sequence


class BlockTables:
    """Changes sequences' block tables and keeps the cache's references in step with them."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._copy_sources: list[int] = []

    def extend_keys(self, sequence: Sequence) -> None:
        """Keys for all full blocks of the tokens known."""
        done = len(sequence.keys)
        if sequence.num_tokens // self._block_size > done:
            sequence.keys += self._cache.keys_for(
                sequence.token_ids[done * self._block_size :],
                sequence.request.cache_salt,
                sequence.keys[-1] if done else None,
                adapter=sequence.request.adapter_key,
            )

    def match(self, sequence: Sequence) -> None:
        """Starts the table of a sequence without blocks with what is cached of it, but for its last token.

        The last token is computed in any case, since the next one is sampled from its forward.
        """
        self.extend_keys(sequence)
        most = self.most_cached(sequence)
        sequence.block_table = self._cache.match(sequence.keys[:most], sequence.token_ids)
        sequence.num_committed_blocks = len(sequence.block_table)
        sequence.num_computed_tokens = len(sequence.block_table) * self._block_size
        sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.loaded_tokens = ()

    def renew(self, sequence: Sequence) -> None:
        """What is cached of a sequence that has to wait counts as just used, so that it is evicted later."""
        self.extend_keys(sequence)
        keys = sequence.keys[: self.most_cached(sequence)]
        self._cache.release(self._cache.match(keys, sequence.token_ids))

    def give_up(self, sequence: Sequence, num_releases: int, promised: int) -> None:
        """Gives back what `match` has found and notes why; `num_releases` are those before the look-up."""
        num_cached = len(sequence.block_table)
        most = self.most_cached(sequence)
        next_key = sequence.keys[num_cached] if num_cached < most else None
        sequence.attempt = Attempt(num_cached, next_key, num_releases + self.free(sequence), promised)

    def is_hopeless(self, sequence: Sequence, promised: int) -> bool:
        """True if another look-up cannot get the sequence admitted: a long one costs milliseconds, each step.

        The hit can grow only by its next block. With the same hit it takes more free blocks: at least as many as it
        lacks and, if it lacked some last time, one that has become free since or is promised to fewer others.
        """
        last = sequence.attempt
        if last is None or (last.next_key is not None and self._cache.is_cached(last.next_key)):
            return False
        if self._cache.num_releases == last.num_releases and promised >= last.promised:
            return True
        num_missing = self._cache.num_blocks_for(sequence.num_tokens) - last.num_cached
        return num_missing + promised > self._cache.num_free

    def adopt(self, sequence: Sequence, adopted: AdoptedKv, most: int) -> None:
        """Starts the table with blocks that a transfer has filled, to be used up to `most` tokens."""
        sequence.block_table = list(adopted.block_ids)
        self.extend_keys(sequence)
        self.commit(sequence, min(adopted.num_tokens, most))

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before the tokens up to `num_tokens` can be computed, a copy on write included."""
        missing = self._cache.num_blocks_for(num_tokens) - len(sequence.block_table)
        if sequence.load is not None:
            missing -= len(sequence.load.block_ids)
        return max(0, missing) + self._is_shared_partial(sequence)

    def grow(self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> bool:
        """Room for the tokens up to `num_tokens`; False (and no change) when blocks run out.

        The block of the next token is copied first if others read it too; `copies` gets (source, destination), and
        the source stays referenced: in the same plan its last owner may be preempted, and a transfer take the block.
        """
        missing = self.num_missing(sequence, num_tokens)
        if not missing:
            return True
        fresh = self._cache.allocate(missing)
        if fresh is None:
            return False
        if self._is_shared_partial(sequence):
            at = sequence.num_computed_tokens // self._block_size
            shared, own = sequence.block_table[at], fresh.pop(0)
            copies.append((shared, own))
            self._copy_sources.append(shared)  # with the sequence's reference
            sequence.block_table[at] = own
        sequence.block_table += fresh
        return True

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Books that the KV up to `num_computed_tokens` is there; full blocks become findable and immutable."""
        sequence.num_computed_tokens = num_computed_tokens
        num_full = num_computed_tokens // self._block_size
        if num_full > len(sequence.keys):
            self.extend_keys(sequence)
        for i in range(sequence.num_committed_blocks, num_full):
            tokens = sequence.token_ids[i * self._block_size : (i + 1) * self._block_size]
            parent = sequence.keys[i - 1] if i else None
            sequence.block_table[i] = self._cache.commit(
                sequence.block_table[i],
                sequence.keys[i],
                tokens,
                parent,
                sequence.request.cache_salt,
                "" if sequence.request.adapter is None else sequence.request.adapter.name,
            )
        sequence.num_committed_blocks = max(sequence.num_committed_blocks, num_full)

    def fork(self, trunk: Sequence, child: Sequence) -> None:
        """Lets `child`, whose tokens go on from the trunk's, share everything that `trunk` has computed."""
        child.num_computed_tokens = trunk.num_computed_tokens
        child.num_committed_blocks = trunk.num_committed_blocks
        child.block_table = trunk.block_table[: self._cache.num_blocks_for(child.num_computed_tokens)]
        child.keys = list(trunk.keys)
        child.num_cached_tokens = trunk.num_cached_tokens
        self._cache.acquire(child.block_table)

    def free(self, sequence: Sequence) -> int:
        """Gives all blocks back; the tokens have to be computed again or found in the cache. Returns how many got free.

        A block that is still to be copied stays referenced until `forget_copies`, those that a tier fills until it is
        done.
        """
        if sequence.load is not None:
            sequence.load.abandon()
            sequence.load = None
        num_freed = self._cache.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0
        sequence.attempt = None
        return num_freed

    def forget_copies(self) -> None:
        """The copies have been made, or never will be: their sources may go."""
        sources, self._copy_sources = self._copy_sources, []
        for source in sources:
            self._cache.release([source])

    def most_cached(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache or a tier."""
        return 0 if sequence.wants_prompt_logprobs else (sequence.num_tokens - 1) // self._block_size

    def _is_shared_partial(self, sequence: Sequence) -> bool:
        at = sequence.num_computed_tokens // self._block_size
        if at >= len(sequence.block_table):
            return False
        block_id = sequence.block_table[at]
        return self._cache.ref_count(block_id) - self._copy_sources.count(block_id) > 1

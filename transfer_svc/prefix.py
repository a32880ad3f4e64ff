"""The leading blocks of one sequence that are in this worker's pool and verified; a pull makes it grow.

A block is taken when the sender's is ready, copied, its checksum verified on the copy, its key compared with our own
computation, and committed. So whatever happens to the transfer, what is here can be used.

Of a KV group with a window only the blocks are brought that the sequence will see where it goes on; until they are all
here the sequence cannot go on, but what has come is cached.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.host import EngineHost
from engine.request import AdapterId, AdoptedKv
from engine.transfer.copies import copy_blocks, copy_part, read_blocks
from engine.transfer.frames import ZERO_KEY, BlockFrame, FrameError
from engine.transfer.landing import Landing
from engine.transfer.plane import BLOCKS_PER_READ, BlockReceiver, Plane, block_bytes
from kvstore.kv_groups import HeldBlocks
from pagewire.worker_metrics import WorkerMetrics
from transfer_svc.client import PulledEnd, ReadyBlocks
from transfer_svc.reservations import Reservation, Reservations
from transfer_svc.tier_prefix import load_from_tiers


class RingStarved(Exception):
    """There is no room for what lies in the sender's ring: let go of the ring, others need it."""


class WrongTokens(Exception):
    """The sender's blocks have other keys: it computed other tokens."""


class VerifiedPrefix:
    """Owns one reference on each of its blocks until `release` or `adopt`."""

    def __init__(
        self, token_ids: Sequence[int], host: EngineHost[Any], reservations: Reservations, metrics: WorkerMetrics
    ) -> None:
        self.arrivals: list[float] = []  # when each pulled block came, by the event loop's clock
        self.num_arrived_tokens = 0  # those of the pulled blocks of KV group 0
        self.loaded: tuple[tuple[str, int], ...] = ()  # tokens that this worker's tiers had, by tier
        self._token_ids = token_ids
        self._host = host
        self._io = host.memory.io
        self._cache = host.kv_cache
        self._reservations = reservations
        self._metrics = metrics
        self._keys: list[bytes] = []
        self._cache_salt = ""
        self._adapter: AdapterId | None = None
        self._groups = self._cache.groups
        # By KV group: the number of its first block that is wanted, and the blocks from there on.
        self._firsts = self._groups.first_blocks(self._groups.restart(len(token_ids)))
        self._tables: list[list[int]] = [[] for _ in self._firsts]
        self._part: tuple[int, int] | None = None  # the next block, if some parts of it have arrived, and its group
        self._part_bytes = 0
        self._num_covered = 0  # tokens of which somebody has KV: the sender, or this worker's cache

    @property
    def keys(self) -> list[bytes]:
        """Of all full blocks of the sequence; empty before `match`."""
        return self._keys

    @property
    def next_blocks(self) -> tuple[int, ...]:
        """By KV group the number in the sequence of the next block that is missing."""
        return tuple(first + len(table) for first, table in zip(self._firsts, self._tables, strict=True))

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose KV is here and verified, as far as a sequence can go on behind them."""
        num_tokens = min(min(self.next_blocks) * self._cache.block_size, self._num_covered)
        return num_tokens if self._can_go_on(num_tokens) else 0

    @property
    def num_blocks(self) -> int:
        """Leading full blocks, likewise."""
        return self.num_tokens // self._cache.block_size

    def num_lacking(self, depth: int) -> int:
        """Blocks of the pool, at most, that are missing for a sequence to go on behind `depth` blocks."""
        if self._groups.is_plain:
            return depth - self.num_blocks
        kept = min(len(self._tables[0]), depth) if self._groups.groups[0].window is None else 0
        return self._groups.num_hit_blocks(depth) - kept

    def deepest(self, most: int, num_blocks: int) -> int:
        """The largest depth, up to `most`, for which no more than `num_blocks` blocks of the pool are missing."""
        depth = most
        while depth > self.num_blocks and self.num_lacking(depth) > num_blocks:
            excess = self.num_lacking(depth) - num_blocks
            depth -= max(1, excess // len(self._groups))
        return max(depth, self.num_blocks)

    async def match(
        self, cache_salt: str, adapter: AdapterId | None = None, *, as_hit: bool = False, always: bool = False
    ) -> None:
        """Computes the keys and takes the leading blocks that are here already, in the pool or below it, unless they
        are dearer to load than to compute; with `always` whatever it costs.

        `as_hit`: what the engine would find, else what it needs at the end of the tokens.
        """
        self._cache_salt, self._adapter = cache_salt, adapter
        keys_for = partial(self._cache.keys_for, adapter=b"" if adapter is None else adapter.key)
        self._keys = await self._host.in_thread(keys_for, self._token_ids, cache_salt)
        as_hit = as_hit and not self._groups.is_plain
        if as_hit:
            self.aim(self._cache.hit_depth(self._keys))
        else:
            self.match_again()
        found = await load_from_tiers(
            self._host,
            self._keys,
            self._token_ids,
            [self.num_blocks] * self._groups.num_full if as_hit else self.next_blocks,
            cache_salt,
            "" if adapter is None else adapter.name,
            as_runs=not as_hit and not self._groups.is_plain,
            max_blocks=self._reservations.num_spare,
            always=always,
        )
        if self._groups.is_plain:
            self._tables[0] += found.block_ids
        elif found.block_ids:
            if as_hit:
                self.aim(self._cache.hit_depth(self._keys))
            else:
                self._match_anew()
            self._cache.release(found.block_ids)
        self.loaded = found.num_tokens(self.num_blocks if as_hit else self.next_blocks[0])
        self._cover_what_is_here()

    @property
    def num_loaded_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.loaded)

    def match_again(self) -> None:
        """After `release`: takes what is still here."""
        self._tables = [
            self._cache.match_run(group, self._keys, self._token_ids, first) for group, first in enumerate(self._firsts)
        ]
        self._cover_what_is_here()

    def _match_anew(self) -> None:
        """Takes what is here now, and gives back what it had."""
        before = self._tables
        self.match_again()
        for table in before:
            self._cache.release(table)

    def match_further(self) -> None:
        """Takes what has come into the cache behind the blocks that are here."""
        self.drop_part()
        if self._groups.is_plain:
            before, num_before = self._tables, self.next_blocks[0]
            self.match_again()
            if self.next_blocks[0] <= num_before:
                before, self._tables = self._tables, before
            self._cache.release(before[0])
        elif (depth := self._cache.hit_depth(self._keys)) > self.num_blocks:
            self.aim(depth)

    def fall_back(self) -> None:
        """A pull broke off. Where groups slide the sequence goes on where a hit ends now: before the pull, or further.

        If that is nowhere, what has come is kept: the next pull may bring the rest.
        """
        if not self._groups.is_plain:
            self.match_further()

    def take_over(self, num_tokens: int) -> None:
        """A ticket covers so many tokens: the sequence is to go on at their end, which may come before its own."""
        end = min(num_tokens, len(self._token_ids))
        self.cover(end)
        firsts = self._groups.first_blocks(self._groups.restart(end))
        if firsts != self._firsts:
            self._firsts = firsts
            self._match_anew()

    def aim(self, depth: int) -> None:
        """From now on the sequence is to go on behind `depth` blocks: that is what a group with a window needs."""
        if self._groups.is_plain:
            return
        size, before = self._cache.block_size, self._tables
        self._firsts = self._groups.first_blocks(depth * size)
        self._tables = [
            self._cache.match_run(group, self._keys, self._token_ids, first, depth)
            for group, first in enumerate(self._firsts)
        ]
        for table in before:
            self._cache.release(table)
        self._cover_what_is_here()

    def cover(self, num_tokens: int) -> None:
        """Somebody has the KV of this many leading tokens."""
        self._num_covered = max(self._num_covered, min(num_tokens, len(self._token_ids)))

    def release(self) -> None:
        """Gives back every block."""
        self.drop_part()
        tables, self._tables = self._tables, [[] for _ in self._firsts]
        for table in tables:
            self._cache.release(table)
        if any(tables):
            self._host.announce()

    def drop_part(self) -> None:
        """Gives back a block of which only some parts have come."""
        if self._part is not None:
            self._cache.release(self._part[:1])
            self._part = None
            self._host.announce()

    def adopt(self, num_known_tokens: int) -> AdoptedKv | None:
        """Passes the references on; None if there is nothing. `num_known_tokens`: what the engine starts with.

        At least one of them is left to compute, or there would be nothing to sample from.
        """
        self.drop_part()
        num_tokens = min(self.num_tokens, num_known_tokens - 1)
        num_blocks = self._cache.num_blocks_for(num_tokens)
        if not num_blocks or not self._can_go_on(num_tokens):
            self.release()  # what has come is cached; the engine makes of it what it can
            return None
        held = []
        for first, table in zip(self._firsts, self._tables, strict=True):
            held.append(HeldBlocks(first, tuple(table[: num_blocks - first])))
            self._cache.release(table[num_blocks - first :])
        self._tables = [[] for _ in self._firsts]
        return AdoptedKv(held[0].block_ids, num_tokens, held[0].first, tuple(held[1:]))

    def _can_go_on(self, num_tokens: int) -> bool:
        """Whether every group has what the token behind so many sees."""
        wanted = self._groups.first_blocks(num_tokens)
        return all(first <= seen for first, seen in zip(self._firsts, wanted, strict=True))

    def _cover_what_is_here(self) -> None:
        self.cover(min(self.next_blocks) * self._cache.block_size)

    def check_is_whole(self, end: PulledEnd) -> None:
        """Raises FrameError if blocks are missing that somebody needs."""
        all_finished = bool(end.first_tokens) and all(token.finished for token in end.first_tokens)
        if not all_finished and self.num_tokens < end.num_tokens:
            raise FrameError(f"the pull ended after {self.num_tokens} of {end.num_tokens} tokens")

    # --- what a pull brings; all of it is to be awaited inside `mine.preemptible()` ---

    async def take_ready(
        self, ready: ReadyBlocks, receiver: BlockReceiver, turns: asyncio.Semaphore, mine: Reservation
    ) -> None:
        """Reads blocks out of the sender's memory, as many at a time as there is room for.

        Some planes wait for the sender: on a thread of its own kind, in turns, and for one read at a time, so that what
        came before a sender froze is kept.
        """
        self._check_place(ready.group, ready.first_block, ready.keys)
        done, waits = 0, receiver.plane.waits_for_sender
        while done < len(ready.blocks):
            if receiver.plane is Plane.SHM_RING and not self._reservations.has_room(mine):
                raise RingStarved
            most = min(len(ready.blocks) - done, self._io.most, BLOCKS_PER_READ if waits else self._io.most)
            block_ids = await self._reservations.allocate(mine, most)
            blocks = ready.blocks[done : done + len(block_ids)]
            landing = Landing()
            copy = partial(read_blocks, self._io, receiver, blocks, block_ids, landing)
            await self._fill(ready.group, block_ids, landing, copy, turns=turns if waits else None)
            done += len(block_ids)

    async def take_frame(self, frame: BlockFrame, mine: Reservation) -> None:
        """Copies blocks, or a part of one, out of a frame."""
        size = block_bytes(self._host.memory)
        self._check_place(frame.group, frame.first_block, frame.keys)
        if len(frame.checksums) == 1 and len(frame.payload) < size:
            await self._take_part(frame, mine)
            return
        if frame.offset or len(frame.payload) != size * len(frame.checksums):
            raise FrameError(f"{len(frame.payload)} bytes for {len(frame.checksums)} blocks of {size}")
        done = 0
        while done < len(frame.checksums):
            block_ids = await self._reservations.allocate(mine, min(len(frame.checksums) - done, self._io.most))
            end = done + len(block_ids)
            payload = memoryview(frame.payload)[done * size : end * size]
            digests = frame.checksums[done:end]
            copy = partial(copy_blocks, self._io, block_ids, payload, digests)
            await self._fill(frame.group, block_ids, Landing(), copy)
            done = end

    async def _take_part(self, frame: BlockFrame, mine: Reservation) -> None:
        size = block_bytes(self._host.memory)
        if frame.offset == 0:
            self.drop_part()
            (block_id,) = await self._reservations.allocate(mine, 1)
            self._part, self._part_bytes = (block_id, frame.group), 0
        follows = self._part is not None and self._part[1] == frame.group and frame.offset == self._part_bytes
        if self._part is None or not follows or frame.offset + len(frame.payload) > size:
            raise FrameError(f"a part at offset {frame.offset} that does not follow the one before it")
        await self._host.in_thread(copy_part, self._io, self._part[0], frame.offset, frame.payload, frame.checksums[0])
        self._part_bytes += len(frame.payload)
        if self._part_bytes == size:
            block_ids, self._part = [self._part[0]], None
            self._commit(frame.group, block_ids)

    async def _fill(
        self,
        group: int,
        block_ids: list[int],
        landing: Landing,
        copy: Callable[[], None],
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """Copies on a thread and commits; if that fails the blocks are given back when nothing lands there.

        With `turns` it waits for its turn and copies on a thread that may wait for a peer.
        """
        try:
            if turns is None:
                await self._host.in_thread(copy, on_cancel=landing.stop)
            else:
                async with turns:
                    await self._host.in_peer_thread(copy, on_cancel=landing.stop)
        except BaseException:
            self._host.quarantine.release(block_ids, landing)
            raise
        self._commit(group, block_ids)

    def _commit(self, group: int, block_ids: list[int]) -> None:
        size, now = self._cache.block_size, asyncio.get_running_loop().time()
        for block_id in block_ids:
            i = self.next_blocks[group]
            if (i + 1) * size <= self._num_covered:
                tokens, parent = self._token_ids[i * size : (i + 1) * size], self._keys[i - 1] if i else None
                name = "" if self._adapter is None else self._adapter.name
                block_id = self._cache.commit(
                    block_id, self._keys[i], tokens, parent, self._cache_salt, name, group=group, is_received=True
                )
            self._tables[group].append(block_id)
            self.arrivals.append(now)
        self.num_arrived_tokens += 0 if group else len(block_ids) * size
        self._host.flush_events()
        self._metrics.transfer_blocks.inc(len(block_ids))
        self._metrics.transfer_bytes.inc(len(block_ids) * block_bytes(self._host.memory))

    def _check_place(self, group: int, first_block: int, keys: Sequence[bytes]) -> None:
        """The blocks are the next ones, and what the sender computed is what this prompt needs."""
        stop = first_block + len(keys)
        here = self.next_blocks[group]
        if first_block != here or stop > self._cache.num_blocks_for(self._num_covered):
            raise FrameError(f"blocks {first_block} … {stop - 1} where block {here} was to come")
        for i, key in enumerate(keys, first_block):
            is_full = (i + 1) * self._cache.block_size <= self._num_covered
            if (key or ZERO_KEY) != (self._keys[i] if is_full else ZERO_KEY):
                raise WrongTokens(f"block {i} of the sender has another key: it computed other tokens")

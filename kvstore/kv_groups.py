"""KV groups: layers whose KV lies in blocks of their own, since they forget at different distances (DESIGN §6). Pure.

All groups have the same number of layers, so that their blocks have one size and any free block of the pool serves any
group. Gemma 3 270M, 15 layers with a window of 512 and 3 that see everything:

    group 0      layers 5, 11, 17        | b | b | b | b | b | b | b | b |   the whole sequence: the index knows it
    group 1      layers 0, 1, 2          | - | - | - | - | - | b | b | b |   what lies outside the window is given back
    …                                                         ╰ window ╯
    group 5      layers 13, 14, 15 …     | - | - | - | - | - | b | b | b |

A block table is in the order of the sequence in every group; what a group has given back is `RELEASED` in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

RELEASED = -1
"""In a block table: the sequence held a block here, and no later token will see what was in it."""

_MOST_PADDING = 0.025
_LENGTHS = (2, 16)  # windows: of short sequences padding of the sliding groups is much, of long ones of the others


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers by number; their tokens see the `window` latest positions at most, their own included, or all (None)."""

    layers: tuple[int, ...]
    window: int | None = None
    latent: bool = False
    """Its blocks have latents, not keys and values."""

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position`, or any later one, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A sequence's blocks number `first`, `first` + 1, … in one group."""

    first: int = 0
    block_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Number of the first block behind them."""
        return self.first + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class KvGroups:
    """All groups of a model. If there is one that sees everything, it is number 0.

    `max_chunk`: tokens that a step computes of a sequence at most.
    """

    groups: tuple[KvGroup, ...] = (KvGroup(()),)
    block_size: int = 16
    max_chunk: int = 1 << 20

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def slides(self) -> bool:
        """Whether any group gives blocks back."""
        return any(group.window is not None for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """One group that keeps everything: what most models have."""
        return len(self.groups) == 1 and self.groups[0].window is None

    @property
    def num_full(self) -> int:
        """Groups that keep everything; they are the first."""
        return sum(group.window is None for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def layout(self) -> str:
        """Names the groups in the root of the block keys; a plain group's name has no layer numbers."""
        if self.is_plain:
            return f"0:{'latent' if self.groups[0].latent else 'full'}:{len(self.groups[0].layers)}"
        return ";".join(
            f"{i}:{'full' if group.window is None else f'sliding{group.window}'}:{','.join(map(str, group.layers))}"
            for i, group in enumerate(self.groups)
        )

    def place(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and the layer's number in it."""
        return next((i, group.layers.index(layer)) for i, group in enumerate(self.groups) if layer in group.layers)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy in a group that keeps everything."""
        return -(-num_tokens // self.block_size)

    def first_block(self, group: int, position: int) -> int:
        """The first block of a group that the token at `position`, or any later one, sees a part of."""
        return self.groups[group].first_seen(position) // self.block_size

    def first_blocks(self, position: int) -> tuple[int, ...]:
        """`first_block` of each group."""
        return tuple(self.first_block(group, position) for group in range(len(self.groups)))

    def restart(self, num_tokens: int) -> int:
        """Where whoever takes over `num_tokens` computed tokens goes on at the earliest: it may have to compute the
        last one again."""
        return max(0, num_tokens - 1)

    def most_held(self, group: int) -> int | None:
        """The most blocks that a group holds of a sequence: its window's and a chunk's, at any alignment.

        None if it keeps everything. A chunk counts as a block at least: that of a last token which is computed again is
        held twice, as it was found and as the copy that is written to.
        """
        window, chunk = self.groups[group].window, max(self.max_chunk, self.block_size)
        return None if window is None else (window - 1 + chunk + self.block_size - 2) // self.block_size + 1

    def num_pool_blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """The most blocks of the pool that sequences of `num_tokens` tokens together hold on their way there."""
        num_blocks, total = self.num_blocks_for(num_tokens), 0
        for group in range(len(self.groups)):
            most = self.most_held(group)
            total += num_blocks if most is None else min(num_blocks, most * num_sequences)
        return total

    def num_hit_blocks(self, depth: int) -> int:
        """Blocks of the pool that a hit of `depth` blocks of a prompt takes references on."""
        return sum(depth - first for first in self.first_blocks(depth * self.block_size))

    def longest_hit(self, num_tokens: int) -> int:
        """The most blocks of a sequence that may be found, of which the last token at least is computed again.

        All full ones, but for the last if a group gives up with it what the last token sees and the one behind doesn't.
        """
        last = num_tokens - 1
        is_whole = self.is_plain or self.first_blocks(last) == self.first_blocks(num_tokens)
        return (num_tokens if is_whole else last) // self.block_size

    def deepest_whole(self, depth: int, first_missing: Callable[[int, int, int], int | None]) -> int:
        """The deepest hit, up to `depth`, whose end every sliding group has.

        `first_missing(group, first, end)`: the first of a group's blocks `first` … `end` - 1 that isn't there. All hits
        that end behind it, up to here, would need it, so the search goes on before it: where all is gone, a window at
        a time.
        """
        sliding = [i for i, group in enumerate(self.groups) if group.window is not None]
        is_settled = not sliding
        while depth and not is_settled:
            is_settled = True
            for group in sliding:
                missing = first_missing(group, self.first_block(group, depth * self.block_size), depth)
                if missing is not None:
                    depth, is_settled = missing, False
        return depth

    def deepest_hit(self, num_blocks: int, most: int) -> int:
        """The deepest hit, up to `most`, that takes no more than so many blocks of the pool."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_hit_blocks(middle) <= num_blocks else (low, middle - 1)
        return low

    def longest_sequence(self, num_blocks: int, most: int) -> int:
        """The longest sequence in tokens, up to `most`, that a pool of so many blocks holds."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_pool_blocks(middle) <= num_blocks else (low, middle - 1)
        return low

    def capacity(self, num_blocks: int) -> int:
        """A pool's size in blocks of a prompt: what it holds of short prompts together, or of one that is long."""
        if self.is_plain:
            return num_blocks
        longest = self.longest_sequence(num_blocks, num_blocks * self.block_size)
        return max(num_blocks // len(self.groups), longest // self.block_size)


def sliding_windows(windows: Sequence[int | None], longest: int) -> tuple[int | None, ...]:
    """The windows of a model's layers, but None where no sequence, of `longest` tokens at most, outgrows them."""
    return tuple(None if window is None or window >= longest else window for window in windows)


def plan_groups(
    windows: Sequence[int | None], *, block_size: int, max_chunk: int, one: bool = False, latent: bool = False
) -> KvGroups:
    """The groups of a model whose layers have these windows; `one`: a single group that keeps everything.

    `latent`: of a model whose layers all keep latents, and everything.

    A window smaller than a block counts as a block. So the first block that a sequence holds of a group has no row
    behind the sequence's end: the kernels read it in the place of those before it, and its values must be numbers.

    Layers of one kind are divided into groups of equal size, the last filled up with layers that nobody uses. Larger
    groups mean fewer tables, smaller ones less padding: the fewest groups whose padding is a small part of what a
    sequence of two windows holds, and one of sixteen.
    """
    if one or not any(windows):
        return KvGroups((KvGroup(tuple(range(len(windows))), latent=latent),), block_size, max_chunk)
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(None if window is None else max(window, block_size), []).append(layer)
    by_kind = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    size = _group_size([(window, len(layers)) for window, layers in by_kind])
    groups = tuple(
        KvGroup(tuple(layers[start : start + size]), window)
        for window, layers in by_kind
        for start in range(0, len(layers), size)
    )
    return KvGroups(groups, block_size, max_chunk)


def _group_size(kinds: Sequence[tuple[int | None, int]]) -> int:
    """Layers of a group; `kinds` are windows and how many layers have them."""
    largest = max(window or 1 for window, _ in kinds)

    def padding(size: int) -> float:
        """The part of what a sequence holds that is padding, at most."""
        return max(_padding(kinds, size, length * largest) for length in _LENGTHS)

    sizes = range(1, max(count for _, count in kinds) + 1)
    good = [size for size in sizes if padding(size) <= _MOST_PADDING]
    return max(good)


def _padding(kinds: Sequence[tuple[int | None, int]], size: int, longest: int) -> float:
    used = sum(count * (window or longest) for window, count in kinds)
    held = sum(-(-count // size) * size * (window or longest) for window, count in kinds)
    return (held - used) / held

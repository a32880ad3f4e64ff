"""Which part of the model a rank has.

q, k, v, gate, up      rows: whole heads, or an equal part      (column-parallel: each rank has some of the outputs)
o, down                columns: what its heads, its part give   (row-parallel: the ranks' products are added up)
embedding, head        rows: a range of the vocabulary
norms, a MoE's router  all of it, on every rank

Of latent attention the latents (q_a, kv_a) are whole on every rank; what is made of them (q_b, kv_b) is cut by heads.

With more ranks than kv heads several ranks have the same kv head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_ROWS = frozenset({"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"})
_KV = frozenset({"k_proj", "v_proj"})
_COLUMNS = frozenset({"o_proj", "down_proj"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True, slots=True)
class Cut:
    """A stored tensor of the shape `whole`, of whose dimension `dim` these ranges, one after another, are wanted."""

    whole: tuple[int, ...]
    dim: int = 0
    ranges: tuple[range, ...] = ()

    def of(self, stored: Tensor) -> Tensor:
        """What is wanted of the stored tensor, contiguous."""
        if not self.ranges:
            return stored
        parts = [stored.narrow(self.dim, part.start, len(part)) for part in self.ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)).contiguous()


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; the other numbers are of the whole model."""

    rank: int
    size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def label(self) -> str:
        """Names files of this rank's weights."""
        return f"tp{self.size}.{self.rank}"

    @property
    def kv_heads(self) -> range:
        """The kv heads of this rank."""
        if self.size > self.num_kv_heads:
            head = self.rank * self.num_kv_heads // self.size
            return range(head, head + 1)
        return _part(self.num_kv_heads, self.rank, self.size)

    @property
    def vocabulary(self) -> range:
        """The token ids whose rows of embedding and head this rank has; the last rank may have fewer than others."""
        each = self.most_token_ids
        return range(min(self.rank * each, self.vocab_size), min((self.rank + 1) * each, self.vocab_size))

    @property
    def most_token_ids(self) -> int:
        """Of a rank."""
        return -(-self.vocab_size // self.size)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut:
        """Where the tensor `name`, of which this rank has `shape`, lies in the stored one."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        rows, rest = shape[0], shape[1:]
        if module in _ROWS:
            return Cut((rows * self.size, *rest), 0, (_part(rows * self.size, self.rank, self.size),))
        if module in _KV:
            return Cut((self.num_kv_heads * self.head_dim, *rest), 0, (self._kv_rows(),))
        if module == "qkv_proj":
            sizes = ((rows - 2 * len(self._kv_rows())) * self.size, *[self.num_kv_heads * self.head_dim] * 2)
            return Cut((sum(sizes), *rest), 0, self._of_fused(sizes))
        if module == "gate_up_proj":
            sizes = (rows // 2 * self.size, rows // 2 * self.size)
            return Cut((sum(sizes), *rest), 0, self._of_fused(sizes))
        if module in _COLUMNS and kind == "weight":
            columns = shape[1] * self.size
            return Cut((rows, columns), 1, (_part(columns, self.rank, self.size),))
        if module in _VOCABULARY:
            return Cut((self.vocab_size, *rest), 0, (self.vocabulary,))
        return Cut(shape)

    def rows(self, name: str, total: int) -> range:
        """Which of the `total` rows of the module `name`, whole and not fused, this rank has."""
        module = name.rpartition(".")[2]
        if module in _ROWS:
            return _part(total, self.rank, self.size)
        if module in _KV:
            return self._kv_rows()
        return self.vocabulary if module in _VOCABULARY else range(total)

    def columns(self, name: str, total: int) -> range:
        """Which of its `total` columns."""
        return _part(total, self.rank, self.size) if name.rpartition(".")[2] in _COLUMNS else range(total)

    def _kv_rows(self) -> range:
        heads = self.kv_heads
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)

    def _of_fused(self, sizes: Sequence[int]) -> tuple[range, ...]:
        """Of parts one below the other: equal parts of each, the kv heads' where there are three."""
        parts = [_part(size, self.rank, self.size) for size in sizes]
        if len(sizes) == 3:
            parts[1:] = [self._kv_rows()] * 2
        return tuple(
            range(start + part.start, start + part.stop) for (start, _), part in zip(_spans(sizes), parts, strict=True)
        )


def check_divisible(size: int, *, num_heads: int, num_kv_heads: int, **sizes: int) -> None:
    """Raises ValueError, with the numbers, for a model that `size` ranks can't share. `sizes` by config field."""
    if num_heads % size:
        raise ValueError(f"{num_heads} attention heads can't be shared evenly by {size} ranks")
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} kv heads can't be shared evenly by {size} ranks, "
            f"nor can each have the same number of ranks"
        )
    for name, value in sizes.items():
        if value % size:
            raise ValueError(f"{name} = {value} can't be shared evenly by {size} ranks")


def _part(total: int, rank: int, size: int) -> range:
    each = total // size
    return range(rank * each, (rank + 1) * each)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return pairwise(ends)

"""Paged attention problems: random sequences in scattered blocks of a pool whose other slots hold garbage."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.memory import KvLayout, KvMemory
from kernels import reference
from kernels.paged import PagedBatch, plan_attention
from kernels.triton.decode_attention import decode_attention
from kernels.triton.device import INTERPRETED_ARCH
from kernels.triton.fp8 import CACHE_DTYPE
from kernels.triton.prefill_attention import prefill_attention, prefill_tiles

# |out - float64| <= tolerance * max |v|, the scale of a weighted mean of v. float32: exp2 of scores up to 10 and sums
# of up to 700 terms, 2^-24 each, measured below 3e-7. The 16-bit types round the weights before the second product, and
# the result: half an ulp each.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.2 * 2.0**-11, torch.bfloat16: 2.2 * 2.0**-8}


@dataclass(frozen=True)
class AttentionCase:
    """Sequence s computes its last query_lens[s] of kv_lens[s] tokens; 0 of 0 is a padding row of a CUDA graph."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    seed: int = 0

    def make(self) -> "AttentionInputs":
        generator = torch.Generator().manual_seed(self.seed)
        num_blocks = [-(-kv_len // self.block_size) for kv_len in self.kv_lens]
        ids = (torch.randperm(sum(num_blocks) + 3, generator=generator)).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in num_blocks]
        cache_dtype = CACHE_DTYPE if self.fp8 else self.dtype
        layout = KvLayout(3, self.num_kv_heads, self.head_dim, self.block_size, cache_dtype)
        blocks = torch.randn(sum(num_blocks) + 3, *layout.block_shape, generator=generator)
        blocks = (blocks * 20).to(cache_dtype) if self.fp8 else blocks.to(self.dtype)
        memory = KvMemory(layout, blocks.shape[0])
        memory.blocks.copy_(blocks)
        num_heads = self.num_kv_heads * self.group_size
        q = torch.randn(sum(self.query_lens), num_heads, self.head_dim, generator=generator).to(self.dtype)
        scales = [_random_scales(blocks.shape[0], self, generator) for _ in range(2)] if self.fp8 else None
        return AttentionInputs(self, q, *memory.layer(1), tables, scales)


def _random_scales(num_blocks: int, case: AttentionCase, generator: torch.Generator) -> Tensor:
    """One for each token of each head; strided as those that stand behind the values in a cell."""
    shape = (num_blocks, case.num_kv_heads, 2 * case.block_size + 4)
    return (torch.rand(shape, generator=generator) / 20 + 0.02)[..., : case.block_size]


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of a case. The caches are strided views of one layer of a block-major pool."""

    case: AttentionCase
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: list[list[int]]
    scales: list[Tensor] | None = None

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5

    def only(self, sequence: int, num_tokens: int | None = None) -> "AttentionInputs":
        """The same sequence alone; with `num_tokens`, only that many of its newest tokens."""
        case = self.case
        end = sum(case.query_lens[: sequence + 1])
        count = case.query_lens[sequence] if num_tokens is None else num_tokens
        alone = replace(case, query_lens=(count,), kv_lens=(case.kv_lens[sequence],))
        return replace(self, case=alone, q=self.q[end - count : end], tables=[self.tables[sequence]])

    def expected(self) -> Tensor:
        """float64 on the same inputs: the inputs converted, so that the oracle rounds nothing."""
        rows = zip(self.case.query_lens, self.case.kv_lens, self.tables, strict=True)
        lens = [(query_len, kv_len, table) for query_len, kv_len, table in rows if query_len]
        batch = PagedBatch.build(*zip(*lens, strict=True), self.case.block_size) if lens else None  # type: ignore[arg-type]
        if batch is None:
            return self.q.double()
        plan = plan_attention(batch, group_size=self.case.group_size, window=self.case.window)
        wide = (self.q.double(), *self.meant())
        return reference.paged_attention(*wide, plan, scale=self.scale, cap=self.case.cap)

    def meant(self) -> list[Tensor]:
        """K and V as float64, scales multiplied in."""
        caches = [self.k_cache.double(), self.v_cache.double()]
        if self.scales is None:
            return caches
        return [cache * scale.double()[..., None] for cache, scale in zip(caches, self.scales, strict=True)]

    def decode(self) -> Tensor:
        return decode_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            **self._metadata(),
            max_kv_len=max(self.case.kv_lens),
            scale=self.scale,
            window=self.case.window,
            cap=self.case.cap,
        )

    def prefill(self) -> Tensor:
        case = self.case
        shape = {"group_size": case.group_size, "head_dim": case.head_dim, "arch": INTERPRETED_ARCH, "fp8": case.fp8}
        return prefill_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            **self._metadata(),
            tiles=prefill_tiles(case.query_lens, case.kv_lens, **shape),
            scale=self.scale,
            window=case.window,
            cap=case.cap,
        )

    def _metadata(self) -> dict[str, Tensor]:
        cu_seqlens = torch.tensor([0, *self.case.query_lens]).cumsum(0).int()
        tables = torch.zeros(len(self.tables), max(map(len, self.tables)), dtype=torch.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        kv_lens = torch.tensor(self.case.kv_lens, dtype=torch.int32)
        metadata = {"cu_seqlens": cu_seqlens, "kv_lens": kv_lens, "block_tables": tables}
        if self.scales is not None:
            metadata |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        return metadata

    def error(self, out: Tensor) -> float:
        """Largest error, in units of the largest value of the whole cache."""
        return float((out.double() - self.expected()).abs().max() / self.meant()[1].abs().max())

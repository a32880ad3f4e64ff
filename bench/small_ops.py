"""The native ops beside products and attention, each against torch's own ops: points of bench/kernels_cpu.py.

Shapes are Qwen2-0.5B's, where heads are normalized Qwen3-0.6B's, bfloat16. All but the output matrix stays in the
caches, as in a step: what a floor means there is how far an op is from memory that it does not use.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.paired_calls import Bench, Point, compare
from kernels.cpu.draws import Draw
from kernels.cpu.looks import Look
from kernels.cpu.native import NativeKernels
from kernels.cpu.spaced_rows import spaced_rows
from kernels.paged import PagedBatch

HIDDEN, FFN, VOCABULARY = 896, 4864, 151936
BLOCK_SIZE, BLOCK_BYTES = 16, 24 * 2 * 2 * 16 * 64 * 2  # of all 24 layers
EPS = 1e-6
ROWS = (1, 32, 512)


def small_points(bench: Bench, native: NativeKernels) -> Iterator[Point]:
    for rows in ROWS:
        yield norm_point(bench, native, rows)
        yield gated_point(bench, native, rows)
        yield rope_point(bench, native, rows, (14, 2, 64), normed=False)
        yield rope_point(bench, native, rows, (16, 8, 128), normed=True)
    yield from head_points(bench, native)
    yield from draw_points(bench, native)
    for count in (1, 32):
        yield copy_point(bench, native, count)


def norm_point(bench: Bench, native: NativeKernels, rows: int) -> Point:
    x, residual = (torch.randn(rows, HIDDEN).bfloat16() for _ in range(2))
    weight = torch.randn(HIDDEN).bfloat16()

    def run_torch(_: int) -> Tensor:
        return F.rms_norm(x + residual, (HIDDEN,), weight, EPS)

    return compare(
        bench, "add, rms_norm", "bfloat16", rows, lambda _: native.add_rms_norm(x, residual, weight, EPS),
        {"torch": run_torch}, num_bytes=rows * HIDDEN * 2 * 4, flops=rows * HIDDEN * 5,
    )  # fmt: skip


def gated_point(bench: Bench, native: NativeKernels, rows: int) -> Point:
    gate, up = (torch.randn(rows, FFN).bfloat16() for _ in range(2))
    return compare(
        bench, "silu_and_mul", "bfloat16", rows, lambda _: native.silu_and_mul(gate, up),
        {"torch": lambda _: F.silu(gate) * up}, num_bytes=rows * FFN * 2 * 3, flops=rows * FFN * 2,
    )  # fmt: skip


def rope_point(bench: Bench, native: NativeKernels, rows: int, heads: tuple[int, int, int], *, normed: bool) -> Point:
    """q and k normed (or not) and rotated, k and v stored. `heads`: of q, of k and v, and their size."""
    num_q, num_kv, size = heads
    blocks = -(-rows // BLOCK_SIZE)
    pool = torch.zeros(blocks, 2, num_kv, BLOCK_SIZE, size).bfloat16()
    batch = PagedBatch.build([rows], [rows], [list(range(blocks))], BLOCK_SIZE)
    qkv = spaced_rows(rows, (num_q + 2 * num_kv) * size, torch.bfloat16).normal_()
    cos, sin = native.rope_tables(torch.arange(rows), 10000.0 ** (-torch.arange(0, size, 2) / size), 1.0)
    q_norm, k_norm = (torch.ones(size).bfloat16() if normed else None for _ in range(2))
    wide_cos, wide_sin = (torch.cat((each, each), -1).bfloat16()[:, None] for each in (cos, sin))

    def run_native(_: int) -> Tensor:
        return native.rope_and_store(
            qkv, cos, sin, pool[:, 0], pool[:, 1], batch, q_norm=q_norm, k_norm=k_norm, eps=EPS
        )

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x if norm is None else F.rms_norm(x, (size,), norm, EPS)
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

    def run_torch(_: int) -> Tensor:
        q, k, v = qkv.view(rows, -1, size).split((num_q, num_kv, num_kv), 1)
        pool[batch.slot_blocks, 0, :, batch.slot_offsets] = rotated(k, k_norm)
        pool[batch.slot_blocks, 1, :, batch.slot_offsets] = v
        return rotated(q, q_norm)

    values = rows * (2 * num_q + 4 * num_kv) * size
    return compare(
        bench, "QK-norm, rope, KV" if normed else "rope, KV write", "bfloat16", rows, run_native,
        {"torch": run_torch}, num_bytes=values * 2, flops=rows * (num_q + num_kv) * size * (7 if normed else 3),
    )  # fmt: skip


def head_points(bench: Bench, native: NativeKernels) -> Iterator[Point]:
    """The output matrix with what greedy sampling and a log-probability ask of each row; its rows, as embeddings."""
    weight = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    packed = native.pack(weight)
    for rows in (1, 8, 32):
        x = spaced_rows(rows, HIDDEN, torch.bfloat16).normal_()
        looks = [Look(row, num_top=1, wants_total=True) for row in range(rows)]

        def run_native(_: int, x: Tensor = x, looks: list[Look] = looks) -> object:
            return native.logits_looked_at(x, packed, VOCABULARY, looks, ())

        def run_torch(_: int, x: Tensor = x) -> object:
            logits = F.linear(x, weight).float()
            return logits.argmax(-1).tolist(), logits.logsumexp(-1).tolist()

        yield compare(
            bench, "lm_head, looked at", "bfloat16", rows, run_native, {"torch": run_torch},
            num_bytes=packed.nbytes, flops=2 * rows * VOCABULARY * HIDDEN,
        )  # fmt: skip
    for rows in ROWS:
        ids = torch.randint(VOCABULARY, (rows,))

        def embed_native(_: int, ids: Tensor = ids) -> Tensor:
            return native.embedding(ids, packed)

        def embed_torch(_: int, ids: Tensor = ids) -> Tensor:
            return F.embedding(ids, weight)

        yield compare(
            bench, "embedding", "bfloat16", rows, embed_native, {"torch": embed_torch},
            num_bytes=rows * HIDDEN * 2 * 2, flops=0,
        )  # fmt: skip


def draw_points(bench: Bench, native: NativeKernels) -> Iterator[Point]:
    """One token drawn from a row of logits by Gumbel noise; native noise is keyed, so that a draw can be repeated."""
    logits = torch.randn(VOCABULARY) * 3
    row = logits.numpy()

    def noisy(scaled: Tensor) -> int:
        return int((scaled - torch.empty_like(scaled).exponential_().log()).argmax())

    def torch_top_k(_: int) -> int:
        best, ids = (logits / 0.8).topk(50)
        return int(ids[noisy(best)])

    def torch_top_p(_: int) -> int:
        ordered, ids = (logits / 0.8).sort(descending=True)
        powers = ordered.softmax(-1)
        return int(ids[noisy(ordered.masked_fill(powers.cumsum(-1) - powers > 0.9, -torch.inf))])

    ways = {
        "greedy": (Draw(row), lambda _: int(logits.argmax())),
        "temperature": (Draw(row, temperature=0.8), lambda _: noisy(logits / 0.8)),
        "top_k 50": (Draw(row, temperature=0.8, top_k=50), torch_top_k),
        "top_p 0.9": (Draw(row, temperature=0.8, top_p=0.9), torch_top_p),
    }
    for name, (draw, run_torch) in ways.items():

        def run_native(_: int, draw: Draw = draw) -> object:
            return native.draw([draw])

        yield compare(
            bench, f"draw, {name}", "float32", 1, run_native, {"torch": run_torch},
            num_bytes=VOCABULARY * 4, flops=VOCABULARY,
        )  # fmt: skip


def copy_point(bench: Bench, native: NativeKernels, count: int) -> Point:
    """Whole blocks of the pool to others."""
    blocks = torch.ones(128, BLOCK_BYTES, dtype=torch.uint8)
    copies = [(block, 64 + block) for block in range(count)]
    sources, targets = (torch.tensor(each) for each in zip(*copies, strict=True))

    def run_torch(_: int) -> None:
        blocks[targets] = blocks[sources]

    return compare(
        bench, "copy_blocks", "uint8", count, lambda _: native.copy_blocks(blocks, copies),
        {"torch": run_torch}, num_bytes=2 * count * BLOCK_BYTES, flops=0,
    )  # fmt: skip

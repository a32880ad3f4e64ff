"""Each kernel at Llama-3-8B's shapes: device time against its floor, and against torch's own kernel for the same.

Device events around each call, medians, the two interleaved, inputs rotated through more than the L2 cache. Floors:
4.3 TB/s and 790 TFLOP/s of an H200 (docs/gpu.md). A dry run calls everything once at tiny shapes and measures nothing.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu.results import NOT_MEASURED, Result
from engine.memory import KvLayout, KvMemory
from kernels.triton import block_transfer, fp8, gated_activation, linear, logprobs, rms_norm
from kernels.triton.decode_attention import decode_attention
from kernels.triton.device import device_arch
from kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from kernels.triton.sample import sample
from kernels.triton.token_filter import Filters

BYTES_PER_MS, FLOPS_PER_MS = 4.3e9, 790e9
CACHE_BYTES = 120 << 20
CALLS = 25
BF16 = torch.bfloat16

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """What is served: by default Llama-3-8B in a batch of 64 at a context of 4096."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    batch: int = 64
    context: int = 4096
    prompt: int = 8192


TINY = Shape(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=32, vocab=150, batch=2, context=256, prompt=128)


@dataclass(frozen=True)
class Case:
    """`ours` and `torchs` (or none) make a call on fresh inputs; `bytes` and `flops` of one give the floor."""

    name: str
    shape: str
    ours: Callable[[], Call]
    torchs: Callable[[], Call] | None
    bytes: float
    flops: float = 0.0
    copies: int = 1


def rows(device: torch.device) -> Iterator[Result]:
    shape = TINY if device.type == "cpu" else Shape()
    for case in _cases(device, shape):
        floor = max(case.bytes / BYTES_PER_MS, case.flops / FLOPS_PER_MS)
        try:
            ours, torchs = _measure(device, case)
        except Exception as problem:
            yield Result(
                "timings", case.name, case.shape, f"{type(problem).__name__}: {problem}"[:150], "", "", "WRONG"
            )
            continue
        if device.type == "cpu":
            against = "" if torchs is None else "torch's ran too"
            yield Result("timings", case.name, case.shape, NOT_MEASURED, against, "", "ran")
            continue
        theirs = "" if torchs is None else f", torch {torchs:.4f} ms ({ours / torchs:.2f} of it)"
        yield Result(
            "timings",
            case.name,
            case.shape,
            f"{ours:.4f} ms",
            f"floor {floor:.4f} ms{theirs}",
            f"{floor / ours:.0%}",
            "ok",
        )


def _measure(device: torch.device, case: Case) -> tuple[float, float | None]:
    """Median milliseconds of a call of ours and of torch's."""
    made = [[case.ours() for _ in range(case.copies)]]
    if case.torchs is not None:
        made.append([case.torchs() for _ in range(case.copies)])
    if device.type == "cpu":
        for calls in made:
            calls[0]()
        return 0.0, 0.0 if len(made) == 2 else None
    times: list[list[float]] = [[] for _ in made]
    for warm_up in (True, False):
        spans = []
        for index in range(3 if warm_up else CALLS):
            for which, calls in enumerate(made):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                calls[index % len(calls)]()
                end.record()
                spans.append((which, begin, end))
        torch.cuda.synchronize()
        if not warm_up:
            for which, begin, end in spans:
                times[which].append(begin.elapsed_time(end))
    medians = [statistics.median(each) for each in times]
    return medians[0], medians[1] if len(medians) == 2 else None


def _cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    def floats(*size: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def copies(num_bytes: float) -> int:
        return 1 if device.type == "cpu" else max(1, min(32, int(CACHE_BYTES // num_bytes) + 1))

    h, f, d = shape.hidden, shape.ffn, shape.head_dim
    for tokens in (shape.batch, shape.prompt):

        def norm(tokens: int = tokens) -> Call:
            x, residual, weight = floats(tokens, h), floats(tokens, h), floats(h)
            return lambda: rms_norm.add_rms_norm(x, residual, weight, 1e-5)

        def torchs_norm(tokens: int = tokens) -> Call:
            x, residual, weight = floats(tokens, h), floats(tokens, h), floats(h)
            return lambda: F.rms_norm(x.add_(residual), (h,), weight, 1e-5)

        def gate(tokens: int = tokens) -> Call:
            x, y = floats(tokens, 2 * f).chunk(2, dim=1)
            return lambda: gated_activation.silu_and_mul(x, y)

        def torchs_gate(tokens: int = tokens) -> Call:
            x, y = floats(tokens, 2 * f).chunk(2, dim=1)
            return lambda: F.silu(x) * y

        yield Case("add_rms_norm", f"{tokens} x {h}", norm, torchs_norm, 8 * tokens * h, copies=copies(8 * tokens * h))
        yield Case("silu_and_mul", f"{tokens} x {f}", gate, torchs_gate, 6 * tokens * f, copies=copies(6 * tokens * f))
    yield _gather(device, shape)
    for name, n, k in (
        ("qkv", (shape.heads + 2 * shape.kv_heads) * d, h),
        ("o", h, shape.heads * d),
        ("gate_up", 2 * f, h),
        ("down", h, f),
    ):
        for tokens in (1, shape.batch, shape.prompt // 4):

            def product(n: int = n, k: int = k, tokens: int = tokens, ours: bool = True) -> Call:
                x, weight = floats(tokens, k), floats(n, k)
                return (lambda: linear.linear(x, weight)) if ours else (lambda: F.linear(x, weight))

            size = 2.0 * (n * k + tokens * (n + k))
            yield Case(
                f"linear {name}",
                f"{tokens} x {k} x {n}",
                product,
                lambda product=product: product(ours=False),
                size,
                2.0 * tokens * n * k,
                copies(size),
            )
    yield from _sampling(device, shape)
    for is_fp8 in (False, True):
        yield _decode(device, shape, is_fp8)
    yield _decode(device, replace(shape, batch=1), False)
    yield _prefill(device, shape)


def _gather(device: torch.device, shape: Shape) -> Case:
    num_blocks, words = (8, 64) if device.type == "cpu" else (256, 1 << 20)

    def gather() -> Call:
        blocks = torch.zeros(num_blocks, words, dtype=BF16, device=device)
        ids, buffer = torch.randperm(num_blocks, device=device), torch.empty_like(blocks)
        return lambda: block_transfer.gather_blocks(blocks, ids, buffer)

    def index_select() -> Call:
        blocks = torch.zeros(num_blocks, words, dtype=BF16, device=device)
        ids = torch.randperm(num_blocks, device=device)
        return lambda: blocks.index_select(0, ids)

    return Case("gather_blocks", f"{num_blocks} of {2 * words} bytes", gather, index_select, 4.0 * num_blocks * words)


def _sampling(device: torch.device, shape: Shape) -> Iterator[Case]:
    batch, vocab = shape.batch, shape.vocab

    def draw(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Call:
        logits = torch.randn(batch, vocab, device=device) * 3
        longs = torch.arange(batch, device=device)
        full = {"dtype": torch.float64, "device": device}
        filters = Filters(
            torch.full((batch,), top_k, dtype=torch.int32, device=device),
            torch.full((batch,), top_p, **full),
            torch.full((batch,), -torch.inf, **full),
        )
        heat = torch.full((batch,), temperature, device=device)
        return lambda: sample(
            logits,
            logits_rows=longs.int(),
            temperature=heat,
            seeds=longs,
            positions=longs,
            choices=longs,
            vocab_size=vocab,
            filters=filters if top_k or top_p < 1.0 else None,
        )

    def sorted_draw() -> Call:
        logits = torch.randn(batch, vocab, device=device) * 3
        return lambda: logits.sort(dim=1, descending=True)

    def likeliest() -> Call:
        logits = torch.randn(batch, vocab, device=device)
        longs = torch.arange(batch, device=device)
        rows = longs.int()
        return lambda: logprobs.log_probabilities(
            logits, logits_rows=rows, token_ids=longs, num_top=20, vocab_size=vocab
        )

    def argmax() -> Call:
        logits = torch.randn(batch, vocab, device=device)
        return lambda: logits.argmax(dim=1)

    label, size = f"{batch} x {vocab}", 4.0 * batch * vocab
    yield Case("sample, greedy", label, lambda: draw(0.0), argmax, size, copies=4)
    yield Case("sample, noise", label, lambda: draw(1.0), None, size, copies=4)
    yield Case("sample, top_k 50", label, lambda: draw(1.0, 50), None, size, copies=4)
    yield Case("sample, top_p 0.9 (torch: sort)", label, lambda: draw(1.0, 0, 0.9), sorted_draw, size, copies=4)
    yield Case("log_probabilities, 20", label, likeliest, None, size, copies=4)


def _pool(device: torch.device, shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    memory = KvMemory(KvLayout(1, shape.kv_heads, shape.head_dim, 16, dtype), num_blocks, "private", device)
    memory.blocks.copy_(torch.randn(1, device=device).to(dtype).expand(memory.blocks.shape))
    return memory.layer(0)


def _decode(device: torch.device, shape: Shape, is_fp8: bool) -> Case:
    batch, context, page = shape.batch, shape.context, 16
    pages = context // page
    num_blocks = batch * pages
    dtype = fp8.CACHE_DTYPE if is_fp8 else BF16
    names = ("k_scale", "v_scale") if is_fp8 else ()
    scales = {name: torch.ones(num_blocks, shape.kv_heads, page, device=device) for name in names}
    # Runs of 8 pages stay together, so that FlexAttention's masks of 128 tokens are full ones.
    tables = (torch.randperm(num_blocks // 8)[:, None] * 8 + torch.arange(8)).view(batch, pages).to(device)

    def queries() -> Tensor:
        return torch.randn(batch, shape.heads, shape.head_dim, device=device, dtype=BF16)

    def ours() -> Call:
        q, caches = queries(), _pool(device, shape, num_blocks, dtype)
        arguments = {
            "cu_seqlens": torch.arange(batch + 1, dtype=torch.int32, device=device),
            "kv_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
            "block_tables": tables.int(),
        }
        return lambda: decode_attention(q, *caches, **arguments, **scales, max_kv_len=context, scale=0.1)

    def flex() -> Call:
        owner = torch.empty(num_blocks, dtype=torch.int64, device=device)
        owner[tables.flatten()] = torch.arange(batch, device=device).repeat_interleave(pages)
        mask = create_block_mask(
            lambda b, h, q, kv: owner[kv // page] == b, batch, None, 1, num_blocks * page, device=str(device)
        )
        shared = (1, shape.kv_heads, num_blocks * page, shape.head_dim)
        k, v = (torch.randn(shared, device=device, dtype=BF16).expand(batch, -1, -1, -1) for _ in range(2))
        q = queries()[:, :, None]
        attend = flex_attention if device.type == "cpu" else torch.compile(flex_attention)
        return lambda: attend(q, k, v, block_mask=mask, scale=0.1, enable_gqa=True)

    size = 2.0 * num_blocks * page * shape.kv_heads * shape.head_dim * dtype.itemsize
    name = f"decode_attention{', e4m3' if is_fp8 else ' (torch: FlexAttention, paged mask)'}"
    flops = 4.0 * batch * shape.heads * shape.head_dim * context
    return Case(name, f"{batch} sequences of {context}", ours, None if is_fp8 else flex, size, flops)


def _prefill(device: torch.device, shape: Shape) -> Case:
    length, heads, kv_heads, d = shape.prompt, shape.heads, shape.kv_heads, shape.head_dim

    def ours() -> Call:
        q = torch.randn(length, heads, d, device=device, dtype=BF16)
        caches = _pool(device, shape, length // 16, BF16)
        arch = device_arch(device)
        tiles = prefill_tiles((length,), (length,), group_size=heads // kv_heads, head_dim=d, arch=arch).to(device)
        arguments = {
            "cu_seqlens": torch.tensor([0, length], dtype=torch.int32, device=device),
            "kv_lens": torch.tensor([length], dtype=torch.int32, device=device),
            "block_tables": torch.randperm(length // 16, device=device).int()[None],
        }
        return lambda: prefill_attention(q, *caches, **arguments, tiles=tiles, scale=0.1)

    def flash() -> Call:
        q, k, v = (torch.randn(1, n, length, d, device=device, dtype=BF16) for n in (heads, kv_heads, kv_heads))
        if device.type == "cpu":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def call() -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    flops = 2.0 * heads * d * length * length
    size = 2.0 * length * d * (2 * heads + 2 * kv_heads)
    return Case("prefill_attention (torch: flash)", f"one sequence of {length}", ours, flash, size, flops)

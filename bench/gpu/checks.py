"""Every kernel on the device against float64 on the CPU, and what row invariance promises, bit by bit."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from bench.gpu.results import Result
from engine.device_sampler import DeviceSampler
from engine.memory import KvLayout, KvMemory
from engine.sample import SampleRow
from engine.sampler import Sampler, token_logprobs
from kernels import reference
from kernels.paged import PagedBatch, plan_attention
from kernels.triton import block_transfer, fp8, gated_activation, kv_write, linear, logprobs, rms_norm
from kernels.triton.decode_attention import decode_attention
from kernels.triton.device import device_arch
from kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from pagewire.sampling import SamplingParams

BF16 = torch.bfloat16
HALF_ULP = 2.0**-8


def rows(device: torch.device) -> Iterator[Result]:
    """One for each check; an exception is a row too."""
    for name, check in _checks(device):
        try:
            error, tolerance = check()
        except Exception as problem:
            yield Result("checks", name, "", f"{type(problem).__name__}: {problem}"[:150], "", "", "WRONG")
            continue
        verdict = "ok" if error <= tolerance else "WRONG"
        ratio = f"{error / tolerance:.2f}" if tolerance else ""
        yield Result("checks", name, "", f"{error:.2e}", f"<= {tolerance:.2e}", ratio, verdict)


def random(device: torch.device, *shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def error(out: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Largest difference, relative to the largest expected value; nan becomes inf."""
    size = float(expected.abs().max()) if scale is None else scale
    found = float((out.double().cpu() - expected).abs().max() / size)
    return found if found == found else float("inf")


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    x, weight = random(device, 37, 1096), random(device, 200, 1096, seed=1)
    wide = x.double().cpu()

    def product() -> tuple[float, float]:
        return error(linear.linear(x, weight), reference.linear(wide, weight.double().cpu())), 1.1 * HALF_ULP

    def product_rows() -> tuple[float, float]:
        many = random(device, 150, 1096, seed=2)
        whole = linear.linear(many, weight)
        parts = [linear.linear(many[start:end], weight) for start, end in ((0, 1), (1, 20), (20, 150))]
        return float((whole != torch.cat(parts)).sum()), 0.0

    def norm() -> tuple[float, float]:
        gain = random(device, 1096, seed=3)
        expected = reference.rms_norm(wide, gain.double().cpu(), 1e-5)
        return error(rms_norm.rms_norm(x, gain, 1e-5), expected), 2.1 * HALF_ULP

    def gate() -> tuple[float, float]:
        gate, up = x.chunk(2, dim=1)
        expected = reference.silu_and_mul(gate.double().cpu(), up.double().cpu())
        return error(gated_activation.silu_and_mul(gate, up), expected), 1.1 * HALF_ULP

    def moved_blocks() -> tuple[float, float]:
        blocks = random(device, 9, 3, 512)
        ids = torch.tensor([7, 0, 4], device=device)
        buffer = torch.empty_like(blocks[:3])
        block_transfer.gather_blocks(blocks, ids, buffer)
        return float((buffer != blocks[ids]).sum()), 0.0

    yield "linear", product
    yield "linear: rows alone and together, bits that differ", product_rows
    yield "rms_norm", norm
    yield "silu_and_mul", gate
    yield "gather_blocks, bytes that differ", moved_blocks
    for cache in ("bfloat16", "e4m3"):
        for head_dim in (64, 128):
            case = _Attention(device, head_dim, cache == "e4m3")
            label = f"{cache}, heads of {head_dim}"
            yield f"rope_and_write_kv {label}", case.written
            yield f"decode_attention {label}", case.decode_error
            yield f"prefill_attention {label}", case.prefill_error
            yield f"decode and prefill {label}, bits that differ", case.difference
    yield "sample, tokens that differ from the CPU's", lambda: _sampled(device)
    yield "log_probabilities", lambda: _logprobs(device)


class _Attention:
    """Sequences of ugly lengths, the last tokens of each new."""

    def __init__(self, device: torch.device, head_dim: int, is_fp8: bool) -> None:
        self.query_lens, self.kv_lens = (1, 9, 3), (33, 9, 300)
        self.heads, self.kv_heads = 8, 2
        counts = [-(-length // 16) for length in self.kv_lens]
        ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4)).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        dtype = fp8.CACHE_DTYPE if is_fp8 else BF16
        self.memory = KvMemory(KvLayout(2, self.kv_heads, head_dim, 16, dtype), sum(counts), "private", device)
        self.memory.blocks.copy_(random(device, *self.memory.blocks.shape, dtype=torch.float32).to(dtype))
        scales = [(torch.rand(sum(counts), self.kv_heads, 16) + 0.5).to(device) for _ in range(2)]
        self.scales = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if is_fp8 else {}
        self.q = random(device, sum(self.query_lens), self.heads, head_dim, seed=5)
        self.device, self.head_dim = device, head_dim

    def written(self) -> tuple[float, float]:
        k, v = (random(self.device, 5, self.kv_heads, self.head_dim, seed=seed) for seed in (6, 7))
        cos, sin = (random(self.device, 5, self.head_dim // 2, dtype=torch.float32, seed=seed) for seed in (8, 9))
        slots = torch.tensor([3, 17, 40, 0, 90], device=self.device)
        k_cache, v_cache = self.memory.layer(0)
        q = kv_write.rope_and_write_kv(self.q[:5], k, v, cos, sin, k_cache, v_cache, slots, **self.scales)
        turned = [reference.apply_rope(each.double().cpu(), cos.cpu(), sin.cpu()) for each in (self.q[:5], k)]
        stored = [cache[slots // 16, :, slots % 16].double().cpu() for cache in (k_cache, v_cache)]
        for each, scale in zip(stored, self.scales.values(), strict=False):
            each *= scale[slots // 16, :, slots % 16].double().cpu()[..., None]
        step = 2.0**-4 if self.scales else 1.1 * HALF_ULP
        return max(
            error(q, turned[0]) / (1.5 * HALF_ULP),
            error(stored[0], turned[1]) / step,
            error(stored[1], v.double().cpu()) / step,
        ), 1.0

    def _metadata(self) -> dict[str, Tensor]:
        tables = torch.zeros(len(self.tables), max(map(len, self.tables)), dtype=torch.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        made = {"cu_seqlens": torch.tensor([0, *self.query_lens]).cumsum(0).int(), "block_tables": tables}
        made["kv_lens"] = torch.tensor(self.kv_lens, dtype=torch.int32)
        return {name: tensor.to(self.device) for name, tensor in made.items()} | self.scales

    def decode(self) -> Tensor:
        caches = self.memory.layer(1)
        return decode_attention(self.q, *caches, **self._metadata(), max_kv_len=300, scale=self.head_dim**-0.5)

    def prefill(self) -> Tensor:
        shape = {"group_size": 4, "head_dim": self.head_dim, "arch": device_arch(self.device)}
        tiles = prefill_tiles(self.query_lens, self.kv_lens, fp8=bool(self.scales), **shape).to(self.device)
        caches = self.memory.layer(1)
        return prefill_attention(self.q, *caches, **self._metadata(), tiles=tiles, scale=self.head_dim**-0.5)

    def _error(self, out: Tensor) -> tuple[float, float]:
        batch = PagedBatch.build(self.query_lens, self.kv_lens, self.tables, 16)
        caches = [cache.double().cpu() for cache in self.memory.layer(1)]
        for cache, scale in zip(caches, self.scales.values(), strict=False):
            cache *= scale.double().cpu()[..., None]
        plan = plan_attention(batch, group_size=4, window=None)
        expected = reference.paged_attention(self.q.double().cpu(), *caches, plan, scale=self.head_dim**-0.5)
        return error(out, expected, float(caches[1].abs().max())), 2.2 * HALF_ULP

    def decode_error(self) -> tuple[float, float]:
        return self._error(self.decode())

    def prefill_error(self) -> tuple[float, float]:
        return self._error(self.prefill())

    def difference(self) -> tuple[float, float]:
        return float((self.decode() != self.prefill()).sum()), 0.0


def _sampled(device: torch.device) -> tuple[float, float]:
    history = {"prompt_token_ids": (1, 2, 2, 80), "output_token_ids": (5, 5, 80, 7, 5)}
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.4),
        SamplingParams(top_k=4, temperature=1.3, frequency_penalty=0.4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, presence_penalty=0.8, logit_bias={3: 2.0}),
        SamplingParams(temperature=0.9),
    ]
    wanted = [SampleRow(i % 2, each, 2**64 - 9 - i, i % 2, 50 + i, **history) for i, each in enumerate(params)]
    logits = random(device, 2, 900, dtype=torch.float32) * 2
    allowed = np.arange(900) % 3 != 1
    wanted.append(SampleRow(1, SamplingParams(), 3, 0, 9, allowed=allowed))
    drawn, right = DeviceSampler(900).sample(logits, wanted), Sampler(900).sample(logits.cpu(), wanted)
    return float(sum(one.token_id != other.token_id for one, other in zip(drawn, right, strict=True))), 0.0


def _logprobs(device: torch.device) -> tuple[float, float]:
    logits = random(device, 2, 9001, dtype=torch.float32)
    rows, tokens = torch.tensor([0, 1], dtype=torch.int32, device=device), torch.tensor([5, 8000], device=device)
    found = logprobs.log_probabilities(logits, logits_rows=rows, token_ids=tokens, num_top=5, vocab_size=9001)
    worst = 0.0
    for row, token in enumerate(tokens.tolist()):
        right = token_logprobs(logits[row].cpu().numpy(), token, 5)
        same = int(found.rank[row]) == right.rank and found.top_ids[row].tolist() == [i for i, _ in right.top]
        worst = max(worst, abs(float(found.logprob[row]) - right.logprob) if same else float("inf"))
    return worst, 4e-6

"""What `aot.py` compiles: the shapes of models, and a call of each op's launcher with them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.memory import KvLayout, KvMemory
from kernels.triton import (
    block_transfer,
    decode_attention,
    fp8,
    gated_activation,
    kv_write,
    linear,
    logit_edits,
    logprobs,
    philox,
    prefill_attention,
    rms_norm,
    sample,
    token_filter,
)


@dataclass(frozen=True)
class Model:
    """The shapes that the kernels see. `window`: of its sliding layers. `attention_only`: just a head size."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int | None = None
    cap: float | None = None
    gemma: bool = False
    attention_only: bool = False


MODELS = (
    Model("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256),
    Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936),
    Model("Gemma-3-12B", 3840, 16, 8, 256, 15360, 262208, window=1024, gemma=True),
    Model("heads of 64", 64, 32, 8, 64, 64, 64, attention_only=True),
    Model("heads of 80", 64, 32, 32, 80, 64, 64, attention_only=True),
    Model("heads of 96 capped", 64, 32, 32, 96, 64, 64, cap=50.0, attention_only=True),
)


def calls(model: Model) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call of the launcher) of each op, on CPU tensors of the model's shapes."""
    tokens, dtype = 48, torch.bfloat16
    layout = KvLayout(4, model.num_kv_heads, model.head_dim, 16, dtype)
    memory = KvMemory(layout, 8)
    k_cache, v_cache = memory.layer(1)

    def floats(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    q, k, v = (floats(tokens, h, model.head_dim) for h in (model.num_heads, model.num_kv_heads, model.num_kv_heads))
    wide, hidden = floats(tokens, model.ffn), floats(tokens, model.hidden)
    activate = gated_activation.gelu_tanh_and_mul if model.gemma else gated_activation.silu_and_mul
    angle = floats(tokens, model.head_dim // 2, kind=torch.float32)
    ints, longs = torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
    few, few_longs = ints[:2], longs[:2]
    logits = floats(2, model.vocab, kind=torch.float32)
    batch = {"cu_seqlens": ints, "kv_lens": ints[:-1], "block_tables": torch.zeros(tokens - 1, 256, dtype=torch.int32)}
    common = {**batch, "scale": 0.1, "window": model.window, "cap": model.cap}
    tiles = torch.zeros(4, 2, dtype=torch.int32)

    yield (
        "add_rms_norm",
        lambda: rms_norm.add_rms_norm(hidden, hidden, floats(model.hidden), 1e-6, unit_offset=model.gemma),
    )
    yield "head_rms_norm", lambda: rms_norm.rms_norm(q, floats(model.head_dim), 1e-6, unit_offset=model.gemma)
    yield activate.__name__, lambda: activate(wide, wide)
    yield "rope_and_write_kv", lambda: kv_write.rope_and_write_kv(q, k, v, angle, angle, k_cache, v_cache, longs)
    yield "decode_attention", lambda: decode_attention.decode_attention(q, k_cache, v_cache, max_kv_len=4096, **common)
    yield "prefill_attention", lambda: prefill_attention.prefill_attention(q, k_cache, v_cache, tiles=tiles, **common)
    fp8_caches = KvMemory(KvLayout(4, model.num_kv_heads, model.head_dim, 16, fp8.CACHE_DTYPE), 8).layer(1)
    scales = {name: floats(8, model.num_kv_heads, 16, kind=torch.float32) for name in ("k_scale", "v_scale")}
    yield (
        "rope_and_write_kv_e4m3",
        lambda: kv_write.rope_and_write_kv(q, k, v, angle, angle, *fp8_caches, longs, **scales),
    )
    yield (
        "decode_attention_e4m3",
        lambda: decode_attention.decode_attention(q, *fp8_caches, max_kv_len=4096, **scales, **common),
    )
    yield (
        "prefill_attention_e4m3",
        lambda: prefill_attention.prefill_attention(q, *fp8_caches, tiles=tiles, **scales, **common),
    )
    weight, many = floats(model.ffn, model.hidden), floats(520, model.hidden)
    yield "linear", lambda: linear.linear(hidden, weight, residual=wide)
    yield "linear_many_rows", lambda: linear.linear(many, weight)
    yield (
        "sample",
        lambda: sample.sample(
            logits,
            logits_rows=few,
            temperature=floats(2, kind=torch.float32),
            seeds=few_longs,
            positions=few_longs,
            choices=few_longs,
            vocab_size=model.vocab,
        ),
    )
    changes = logit_edits.LogitEdits(
        starts=ints[:3],
        most=64,
        token_ids=ints,
        bias=floats(tokens, kind=torch.float32),
        seen=ints,
        counts=ints,
        repetition=floats(2, kind=torch.float32),
        frequency=floats(2, kind=torch.float32),
        presence=floats(2, kind=torch.float32),
        allowed=torch.zeros(2, -(-model.vocab // 32), dtype=torch.int32),
    )
    doubles = floats(2, kind=torch.float64)
    yield (
        "sample_filtered",
        lambda: sample.sample(
            logits,
            logits_rows=few,
            temperature=floats(2, kind=torch.float32),
            seeds=few_longs,
            positions=few_longs,
            choices=few_longs,
            vocab_size=model.vocab,
            edits=changes,
            filters=token_filter.Filters(few, doubles, doubles),
        ),
    )
    yield (
        "log_probabilities",
        lambda: logprobs.log_probabilities(
            logits, logits_rows=few, token_ids=few_longs, num_top=20, vocab_size=model.vocab
        ),
    )
    yield "token_noise", lambda: philox.token_noise(model.vocab, seed=longs[:1], position=longs[:1], choice=longs[:1])
    yield (
        "gather_blocks",
        lambda: block_transfer.gather_blocks(memory.blocks, few_longs, torch.zeros_like(memory.blocks)),
    )

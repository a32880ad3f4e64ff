"""A decode step of 32 requests with 32 adapters (rank 8, all projections) against the same step of the base model.

    python -m bench.lora_step --hidden 896 --ffn 4864 --kv-heads 2 --layers 5 --csv bench/lora_step.csv

The model has random weights in Llama's shapes; only the shapes count. Both kinds of request run by turns in one
engine, so that what else the machine does hits both alike; the figures are ratios of medians, by the clock and of CPU
time (with one thread; the pool's waiting counts as CPU).
"""

import argparse
import csv
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.machine import processor
from engine.engine import Engine
from engine.request import EngineRequest
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

NUM_ADAPTERS, RANK, PROMPT = 32, 8, 16


def make_model(
    directory: Path, hidden: int, ffn: int, kv_heads: int, layers: int, dtype: str
) -> dict[str, tuple[int, int]]:
    """Writes it; returns the shapes of what adapters change."""
    heads, vocab = hidden // 64, 32000
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "dtype": dtype, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (hidden, hidden),
            f"{prefix}.self_attn.k_proj": (64 * kv_heads, hidden),
            f"{prefix}.self_attn.v_proj": (64 * kv_heads, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, hidden),
            f"{prefix}.mlp.gate_proj": (ffn, hidden),
            f"{prefix}.mlp.up_proj": (ffn, hidden),
            f"{prefix}.mlp.down_proj": (hidden, ffn),
        }
    kind = getattr(torch, dtype)
    weights = {f"{name}.weight": (torch.randn(shape) * shape[1] ** -0.5).to(kind) for name, shape in shapes.items()}
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=kind)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=kind)
    weights["model.embed_tokens.weight"] = torch.randn(vocab, hidden).to(kind)
    save_file(weights, directory / "model.safetensors")
    return shapes


def make_adapter(directory: Path, shapes: dict[str, tuple[int, int]]) -> None:
    directory.mkdir()
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns) * columns**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK) * 0.01
    save_file(tensors, directory / "adapter_model.safetensors")


def steps(engine: Engine, names: list[str], num_steps: int) -> list[tuple[float, float]]:
    """Seconds of each decode step of one batch: by the clock, and of CPU."""
    params = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    for i, name in enumerate(names):
        adapter = engine.find_adapter(name) if name else None
        prompt = tuple(5 + (13 * i + j) % 1000 for j in range(PROMPT))
        engine.add(EngineRequest(f"r{i}", prompt, params, adapter=adapter))
    seconds = []
    while engine.has_work:
        started_at, cpu = time.perf_counter(), time.process_time()
        output = engine.step()
        if not output.num_prefill_tokens and len(output.tokens) == len(names):
            seconds.append((time.perf_counter() - started_at, time.process_time() - cpu))
    engine.kv_cache.reset()
    engine.kv_cache.take_events()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, help="4 * hidden if not given")
    parser.add_argument("--kv-heads", type=int, help="hidden / 256 if not given")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        torch.manual_seed(0)
        ffn, kv_heads = given.ffn or 4 * given.hidden, given.kv_heads or max(1, given.hidden // 256)
        shapes = make_model(root, given.hidden, ffn, kv_heads, given.layers, given.dtype)
        adapters = [f"a{i}" for i in range(NUM_ADAPTERS)]
        for adapter in adapters:
            make_adapter(root / adapter, shapes)
        engine = Engine(
            EngineOptions(
                model=str(root), kernels=given.kernels, cpu_threads=given.threads, kv_cache_memory_bytes=256 << 20,
                enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=RANK,
                lora_modules=tuple(f"{adapter}={root / adapter}" for adapter in adapters),
            )
        )  # fmt: skip
        found: dict[str, list[tuple[float, float]]] = {"base": [], "adapters": []}
        for _ in range(given.rounds):
            found["base"] += steps(engine, [""] * NUM_ADAPTERS, given.steps)
            found["adapters"] += steps(engine, adapters, given.steps)
        numerics = engine.numerics_class
        engine.close()
    (base, base_cpu), (adapted, adapted_cpu) = (
        [statistics.median(each) * 1e3 for each in zip(*found[kind], strict=True)] for kind in ("base", "adapters")
    )
    row = {
        "hardware": processor(), "numerics": numerics, "threads": given.threads, "hidden": given.hidden,
        "ffn": ffn, "layers": given.layers,
        "adapters": NUM_ADAPTERS, "rank": RANK, "base_ms": round(base, 2), "adapters_ms": round(adapted, 2),
        "ratio": round(adapted / base, 3), "cpu_ratio": round(adapted_cpu / base_cpu, 3),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    print(row)
    if given.csv is not None:
        is_new = not given.csv.exists()
        with given.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()

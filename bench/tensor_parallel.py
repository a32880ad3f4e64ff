"""Tokens per second of one process and of N ranks: `python -m bench.tensor_parallel [--quick] [--size N]`.

A random Llama in bfloat16 on the best kernels here, one thread a rank. N ranks have N threads in all, so this asks what
one more brings; it costs two exchanges per layer. `--exchange` measures those alone: in shared memory and over gloo, by
turns in the same processes.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from bench.machine import describe
from engine.engine import Engine
from engine.parallel import meeting
from engine.parallel.process_ranks import ProcessRanks, file_store
from engine.parallel.shared_ranks import SharedRanks, make_memory
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

VOCAB = 8192


def make_model(directory: Path, hidden: int, layers: int) -> None:
    """Random weights; what they say is of no interest."""
    ffn, heads = hidden * 11 // 4 // 64 * 64, hidden // 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 1,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{name}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (ffn, hidden),
            f"{name}.mlp.up_proj.weight": (ffn, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, ffn),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    torch.manual_seed(0)
    save_file(
        {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()},
        directory / "model.safetensors",
    )


def cpu_seconds(engine: Engine) -> float:
    """Of all its processes, so far."""
    pids = [os.getpid(), *(engine._ranks._pids.values() if engine._ranks else ())]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(model: Path, size: int, num_seqs: int, num_tokens: int) -> tuple[float, float, float]:
    """(prefill, decode) tokens per second and CPU milliseconds of a decode step, the better of two runs."""
    engine = Engine(
        EngineOptions(
            model=str(model),
            tensor_parallel_size=size,
            cpu_threads=size,
            max_num_seqs=num_seqs,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
        )
    )
    try:
        prompts = [[(7 * i + 13 * j) % (VOCAB - 2) + 2 for j in range(256)] for i in range(num_seqs)]
        best, cpu = [0.0, 0.0], math.inf
        for _ in range(2):
            started, before = time.perf_counter(), cpu_seconds(engine)
            engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
            prefilled = time.perf_counter() - started
            prefill_cpu = cpu_seconds(engine) - before
            started, before = time.perf_counter(), cpu_seconds(engine)
            engine.generate(prompts, SamplingParams(max_tokens=1 + num_tokens, temperature=0.0, ignore_eos=True))
            decoded = time.perf_counter() - started - prefilled
            cpu = min(cpu, (cpu_seconds(engine) - before - prefill_cpu) / num_tokens * 1e3)
            best[0] = max(best[0], sum(map(len, prompts)) / prefilled)
            best[1] = max(best[1], num_seqs * num_tokens / max(decoded, 1e-9))
        return best[0], best[1], cpu
    finally:
        engine.close()


def exchange(size: int, num_rows: int, hidden: int, num_rounds: int) -> None:
    """Prints microseconds of a sum of float32 [num_rows, hidden] over `size` ranks: medians of rounds of 200."""
    with tempfile.TemporaryDirectory() as directory:
        fd = make_memory(size)
        with multiprocessing.get_context("fork").Pool(size) as pool:
            work = [(fd, Path(directory) / "meeting", rank, size, num_rows, hidden, num_rounds) for rank in range(size)]
            found = pool.starmap(_exchange, work, chunksize=1)
        os.close(fd)
    for name, column in (("shared memory", 0), ("gloo", 1)):
        clock = statistics.median(each for rank in found for each, _ in rank[column])
        cpu = sum(statistics.median(each for _, each in rank[column]) for rank in found)
        print(f"{num_rows} x {hidden}: {name:13} {clock:8.0f} us, CPU time of all ranks {cpu:8.0f} us")


def _exchange(
    fd: int, meeting: Path, rank: int, size: int, num_rows: int, hidden: int, num_rounds: int
) -> list[list[tuple[float, float]]]:
    """(clock, CPU time) of a sum in microseconds, of each round: in shared memory, over gloo."""
    torch.set_num_threads(1)
    groups = (SharedRanks(fd, rank, size), ProcessRanks(file_store(meeting, size), rank, size))
    x = torch.randn(num_rows, hidden)
    found: list[list[tuple[float, float]]] = [[], []]
    for _ in range(num_rounds):
        for column, group in enumerate(groups):
            group.sum(x)
            clock, cpu = time.perf_counter(), time.process_time()
            for _ in range(200):
                group.sum(x)
            found[column].append(((time.perf_counter() - clock) / 200 * 1e6, (time.process_time() - cpu) / 200 * 1e6))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--exchange", action="store_true", help="only what the ranks' exchanges cost")
    arguments = parser.parse_args()
    if arguments.exchange:
        print(", ".join(f"{name} {value}" for name, value in describe().items()), f"load {os.getloadavg()[0]:.1f}")
        for num_rows in (1, 8, 128):
            exchange(arguments.size, num_rows, arguments.hidden, 3 if arguments.quick else 9)
        return
    hidden, layers = (512, 4) if arguments.quick else (arguments.hidden, 16)
    num_seqs, num_tokens = (2, 64) if arguments.quick else (8, 64)
    print(", ".join(f"{name} {value}" for name, value in describe().items()))
    print(f"hidden {hidden}, {layers} layers, {num_seqs} sequences, one thread a rank")
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), hidden, layers)
        for size, over_gloo in ((1, False), (arguments.size, False), (arguments.size, True)):
            can_share = meeting.can_share
            if over_gloo:
                meeting.can_share = lambda: False
            try:
                prefill, decode, cpu = measure(Path(directory), size, num_seqs, num_tokens)
            finally:
                meeting.can_share = can_share
            how = f"tp{size}" + (" over gloo" if over_gloo else "")
            print(f"{how}: prefill {prefill:8.0f}, decode {decode:8.1f} tokens/s, {cpu:6.1f} CPU ms a decode step")


if __name__ == "__main__":
    main()

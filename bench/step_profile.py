"""Where a decode step's time goes: the kernels, what samples beside lm_head, and the loop around them.

    python -m bench.step_profile --model DIR --csv bench/step_profile.csv            # makes the model there if need be

The model has Qwen2-0.5B's shapes and random weights whose logits are peaked as a trained model's are (entropy of a few
nats). Steps run on the device thread of a worker's engine loop; the main thread turns each into its session message,
as a decode worker does. `around` is everything but the model and the output matrix: schedule, batch, sampling, booking,
handing over, and what the main thread spends on a step. `blocked` is the part of a step in which the device thread
neither ran nor waited for its own pool awake: waits for the GIL, and for a processor.
"""

import argparse
import asyncio
import csv
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.machine import describe
from decode_svc.outbox import Batch
from decode_svc.service import _session_response as session_response
from engine import runner
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.request import EngineRequest, StepOutput
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

HIDDEN, LAYERS, FFN, VOCAB, HEADS, KV_HEADS = 896, 24, 4864, 151_936, 14, 2
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "temperature 0.8, top_k 50": {"temperature": 0.8, "top_k": 50},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
}
PARTS = ("schedule", "batch", "forward", "head", "sample", "book", "hand over", "main thread")


def make_model(directory: Path, *, peak: float = 4.0) -> None:
    """Random weights; the output matrix is scaled so that logits have a standard deviation of `peak`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * (scale * columns**-0.5)).to(torch.bfloat16)

    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN, peak)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            *(("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv, HIDDEN), ("self_attn.v_proj", kv, HIDDEN)),
            *(("self_attn.o_proj", HIDDEN, HIDDEN), ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN)),
            ("mlp.down_proj", HIDDEN, FFN),
        ):
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        for name, size in (("q_proj", HIDDEN), ("k_proj", kv), ("v_proj", kv)):
            tensors[f"{prefix}.self_attn.{name}.bias"] = torch.zeros(size, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")


class Clock:
    """Seconds of each part of the step that runs."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """The method's time, less that of wrapped methods it calls, counts as `part`."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started_at = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                seconds = time.perf_counter() - started_at
                self.parts[part] += seconds - self._inner
                self._inner = outer + seconds

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        parts, self.parts = dict(self.parts), defaultdict(float)
        return parts


class Profile:
    """An engine whose steps are timed part by part."""

    def __init__(self, model: Path) -> None:
        self.engine = Engine(
            EngineOptions(model=str(model), kv_cache_memory_bytes=1 << 30, max_num_seqs=64, enable_prefix_caching=False)
        )
        self._clock, own = Clock(), self.engine._runner
        self._clock.wrap(self.engine.scheduler, "schedule", "schedule")
        self._clock.wrap(runner, "build_batch", "batch")
        self._clock.wrap(own, "_forward", "forward")
        self._clock.wrap(own._model.kernels, "_linear", "head")  # type: ignore[attr-defined]
        self._clock.wrap(own, "execute", "sample")
        self._clock.wrap(self.engine.scheduler, "update", "book")
        own._forward = self._unsplit(own._forward)  # type: ignore[attr-defined]
        self._num_added = 0

    def _unsplit(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The layers' linears belong to the forward, not to the head."""

        def whole(*arguments: Any, **named: Any) -> Any:
            before = self._clock.parts["head"]
            result = forward(*arguments, **named)
            self._clock.parts["forward"] += self._clock.parts["head"] - before
            self._clock.parts["head"] = before
            return result

        return whole

    async def run(self, way: str, num_sequences: int, num_steps: int, prompt: int) -> list[dict[str, float]]:
        """Parts of each pure decode step of `num_sequences`, in seconds; their sum is `step`."""
        found: list[dict[str, float]] = []
        running, done = asyncio.get_running_loop(), asyncio.Event()
        cpu, wall = time.thread_time, time.perf_counter

        def deliver(step: StepOutput) -> None:
            began = wall()
            parts = self._clock.take()
            parts["device wall"], parts["device cpu"] = began - marks[0], cpu() - marks[1]
            marks[:] = [began, cpu()]
            running.call_soon_threadsafe(take, step, parts)
            parts["hand over"] = wall() - began

        def take(step: StepOutput, parts: dict[str, float]) -> None:
            began = wall()
            message = session_response(Batch(tokens=[(0, token) for token in step.tokens]))
            if message is not None:
                message.SerializeToString()
            parts["main thread"] = wall() - began
            if not step.num_prefill_tokens and len(step.tokens) == num_sequences:
                parts["step"] = step.seconds
                found.append(parts)
            if not (step.load.num_running or step.load.num_waiting):
                done.set()

        marks = [wall(), 0.0]
        loop = EngineLoop(self.engine, deliver)
        for _ in range(num_sequences):
            self._num_added += 1
            ids = tuple(5 + (7919 * self._num_added + 13 * i) % 100_000 for i in range(prompt))
            params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True, seed=self._num_added, **WAYS[way])
            loop.add(EngineRequest(f"r{self._num_added}", ids, params))
        loop.start()
        await done.wait()
        loop.stop()
        self.engine.take_events()
        return found[2:]


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians in milliseconds; shares of the step."""
    median = {
        part: statistics.median(each.get(part, 0.0) for each in steps) * 1e3
        for part in (*PARTS, "step", "device cpu", "device wall")
    }
    around = sum(median[part] for part in PARTS if part not in ("forward", "head"))
    blocked = 1 - median["device cpu"] / median["device wall"]
    return median | {"around": around, "around share": around / median["step"], "blocked share": max(0.0, blocked)}


def measure(
    model: Path, batches: list[int], ways: list[str], num_steps: int, rounds: int, prompt: int
) -> list[dict[str, Any]]:
    """The ways by turns, `rounds` times, at each batch size."""
    profile = Profile(model)
    rows = []
    for batch in batches:
        steps: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                steps[way] += asyncio.run(profile.run(way, batch, num_steps, prompt))
        for way, each in steps.items():
            row = {name: round(value, 4 if "share" in name else 3) for name, value in summary(each).items()}
            rows.append({"sequences": batch, "sampling": way, **row})
            print(json.dumps(rows[-1]), flush=True)
    profile.engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if not (given.model / "model.safetensors").exists():
        make_model(given.model)
    rows = measure(given.model, given.batches, given.ways, given.steps, given.rounds, given.prompt)
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*describe(), *rows[0]])
            writer.writeheader()
            writer.writerows(describe() | row for row in rows)


if __name__ == "__main__":
    main()

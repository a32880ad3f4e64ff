"""With a seed the tokens are the same alone, in a batch, after preemption, in one process, through 1P1D and 2P2D."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.engine import Engine
from pagewire import AsyncClient
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.chaos.system import System
from tests.chaos.zygote import Zygote

NUM_TOKENS = 24
PROMPTS = [[(31 * i + 7 * j) % 290 + 5 for j in range(n)] for i, n in enumerate((3, 9, 16, 21, 40, 52))]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 20, "seed": 2},
    {"temperature": 1.3, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**64 - 1},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 5},
    {"temperature": 1.0, "n": 3, "seed": 6, "logit_bias": {17: 2.0}},
]
SMALL_POOL = 26  # blocks of 4: all six requests together need more, so some are preempted


def options(model: Path, **changes: Any) -> EngineOptions:
    defaults = {"max_model_len": 128, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 32}
    return EngineOptions(
        model=str(model), dtype="float32", kernels="reference", block_size=4, cpu_threads=1, **defaults | changes
    )


def params(sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)


def in_one_process(engine: Engine, together: bool) -> list[list[list[int]]]:
    cases = [(p, params(s)) for p, s in zip(PROMPTS, SAMPLING, strict=True)]
    if together:
        return engine.generate([p for p, _ in cases], [s for _, s in cases])
    return [engine.generate([p], s)[0] for p, s in cases]


async def through(target: str, together: bool) -> list[list[list[int]]]:
    async with AsyncClient(target) as client:

        async def one(prompt: list[int], sampling: dict[str, Any]) -> list[list[int]]:
            n = sampling.get("n", 1)
            outputs: list[list[int]] = [[] for _ in range(n)]
            async for chunk in client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling):
                outputs[chunk.choice] += chunk.token_ids
            return outputs

        cases = list(zip(PROMPTS, SAMPLING, strict=True))
        if together:
            return list(await asyncio.gather(*(one(p, s) for p, s in cases)))
        return [await one(p, s) for p, s in cases]


async def test_same_tokens_on_every_path(
    tiny_model: Callable[..., Path], valkey_url: str, zygote: Zygote, tmp_path: Path
) -> None:
    model = tiny_model("qwen3", num_hidden_layers=2)
    with_room = Engine(options(model))
    try:
        expected = in_one_process(with_room, together=False)
        assert len({tuple(o) for o in expected[-1]}) == 3, "choices differ"
        assert in_one_process(with_room, together=True) == expected
        block_bytes = with_room.memory.layout.block_bytes
    finally:
        with_room.close()

    tight = Engine(options(model, kv_cache_memory_bytes=SMALL_POOL * block_bytes, max_model_len=96))
    try:
        assert in_one_process(tight, together=True) == expected
        assert tight.scheduler.num_preemptions > 0, "the pool was too large to show anything"
    finally:
        tight.close()

    flags = ("--dtype", "float32", "--kernels", "reference", "--block-size", "4", "--max-model-len", "128",
             "--max-num-batched-tokens", "32", "--kv-cache-memory-bytes", str(4 << 20),
             "--cpu-threads", "1")  # fmt: skip
    for num in (1, 2):
        directory = tmp_path / str(num)
        directory.mkdir()
        with System.forked(zygote, model, directory, *flags, redis_url=valkey_url, prefill=num, decode=num) as cluster:
            assert await through(cluster.target, together=True) == expected, f"{num}P{num}D"
            assert await through(cluster.target, together=False) == expected, f"{num}P{num}D, warm"
            cluster.wait_quiet()

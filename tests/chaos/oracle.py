"""What an undisturbed engine in this process gives, and streams of a client that are compared with it."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine import Engine
from pagewire import AsyncClient
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine


class Oracle:
    """Outputs by prompt and parameters, each computed once. Thread-safe."""

    def __init__(self, model: Path) -> None:
        self.engine: Engine = make_engine(model, num_blocks=256, max_num_batched_tokens=512)
        self._known: dict[str, list[list[int]]] = {}
        self._lock = threading.Lock()

    def __call__(self, prompt: list[int], **sampling: Any) -> list[list[int]]:
        key = repr((prompt, sorted(sampling.items())))
        with self._lock:
            if key not in self._known:
                self._known[key] = self.engine.generate([prompt], SamplingParams(**sampling))[0]
            return self._known[key]

    def close(self) -> None:
        self.engine.close()


@dataclass
class Stream:
    """A client's view of one request: tokens by choice, without gap or repetition."""

    outputs: list[list[int]]
    text: list[str]
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prefill_worker: str = ""
    decode_worker: str = ""
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


async def stream(
    client: AsyncClient,
    prompt: list[int] | str,
    on_tokens: Callable[[Stream], object] = lambda so_far: None,
    *,
    timeout: float = 60.0,
    pause: float = 0.0,
    **options: Any,
) -> Stream:
    """Reads a request to its end; `on_tokens` sees it grow. Fails on a gap or a repeated token.

    `pause` seconds after each chunk make a slow reader.
    """
    n = options.get("n", 1)
    result = Stream([[] for _ in range(n)], [""] * n)
    async for chunk in client.generate(prompt, timeout=timeout, **options):
        if chunk.done:
            result.prefill_worker, result.decode_worker = chunk.prefill_worker, chunk.decode_worker
            assert chunk.usage is not None
            result.num_cached_tokens = chunk.usage.cached_tokens
        if not (chunk.token_ids or chunk.text or chunk.finish_reason):
            continue
        assert chunk.index == len(result.outputs[chunk.choice]), "a gap or a repetition"
        result.outputs[chunk.choice] += chunk.token_ids
        if "logprobs" in options:
            assert len(chunk.logprobs) == len(chunk.token_ids), "tokens without log-probabilities"
        result.text[chunk.choice] += chunk.text
        if chunk.finish_reason is not None:
            assert chunk.choice not in result.finish_reasons
            result.finish_reasons[chunk.choice] = chunk.finish_reason
        on_tokens(result)
        if pause:
            await asyncio.sleep(pause)
    assert len(result.finish_reasons) == n, "the stream ended before every choice did"
    return result


def greedy(max_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling options that give the same tokens every time."""
    return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1} | more


def prompt(length: int, number: int = 0) -> list[int]:
    """Some token ids; different numbers share no block."""
    return [(31 * number + 7 * i + number * i) % 240 + 10 for i in range(length)]

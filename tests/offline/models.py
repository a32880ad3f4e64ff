"""A tiny model as an LLM, and its engine alone as the reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.engine import Engine
from pagewire import LLM
from pagewire.config import EngineOptions

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_memory_bytes": 2 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "cpu_threads": 1,
}
TinyModel = Callable[..., Path]


@contextmanager
def reference_engine(model: Path, **changes: Any) -> Iterator[Engine]:
    """The engine that `LLM(model, **OPTIONS, **changes)` has."""
    engine = Engine(EngineOptions(model=str(model), **{**OPTIONS, **changes}))
    try:
        yield engine
    finally:
        engine.close()


def tiny_llm(model: Path, **changes: Any) -> LLM:
    """With OPTIONS."""
    return LLM(str(model), **{**OPTIONS, **changes})

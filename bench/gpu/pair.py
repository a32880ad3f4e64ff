"""A prefill and a decode worker on one device, as `pagewire up` starts them, against one engine on the same prompts.

Row invariance makes their tokens the same ones. The engine runs first, so that the workers find its kernels compiled.
Workers need what pagewire itself needs; where some of that is missing, the row says so.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.gpu.results import NOT_MEASURED, Result
from engine.engine import Engine
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams

NAME = "1P1D, two processes on one device"
NEEDED = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "prometheus_client",
    "psutil",
    "redis",
    "rich",
    "typer",
)
PROMPTS = 4
BIGGER: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
BIGGER |= {"num_key_value_heads": 4, "num_hidden_layers": 8, "max_position_embeddings": 2048}


def rows(device: torch.device) -> Iterator[Result]:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        yield Result("pair", NAME, "", f"skipped: not installed: {', '.join(missing)}", "", "", "")
        return
    from tests.tiny_models import VOCAB_SIZE, make_tiny_model

    is_dry = device.type == "cpu"
    prompt, output = (18, 3) if is_dry else (1000, 64)
    options: dict[str, Any] = {"dtype": "float32" if is_dry else "bfloat16", "device": device.type, "kernels": "triton"}
    options |= {"block_size": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": (1 if is_dry else 256) << 20}
    prompts = [[5 + (7 * i * i + j * (i + 3)) % (VOCAB_SIZE - 5) for j in range(prompt)] for i in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model("llama", Path(directory), dtype=options["dtype"], **({} if is_dry else BIGGER))
        engine = Engine(EngineOptions(model=str(model), **options))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        expected = [tokens for (tokens,) in engine.generate(prompts, params)]
        engine.close()
        found, seconds = _served(model, options, prompts, output)
    differ = sum(tokens != own for tokens, own in zip(found, expected, strict=True))
    shape = f"{prompt} + {output} tokens"
    yield Result(
        "pair", f"{NAME}: prompts with other tokens", shape, str(differ), "<= 0", "", "WRONG" if differ else "ok"
    )
    value = NOT_MEASURED if is_dry else f"{seconds * 1e3:.1f} ms a request"
    yield Result("pair", NAME, shape, value, "", "", "ran" if is_dry else "ok")


def _served(
    model: Path, options: dict[str, Any], prompts: list[list[int]], output: int
) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, one request after another, and the seconds of one, the first left out."""
    from tests.e2e.cluster import Cluster

    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found, seconds = [], []
    with Cluster(model, *flags) as cluster, cluster.client() as client:
        while not client.list_models()[0].ready:
            time.sleep(0.05)
        for prompt in prompts:
            began = time.perf_counter()
            done = client.complete(prompt, max_tokens=output, temperature=0, ignore_eos=True)
            seconds.append(time.perf_counter() - began)
            if done.prefill_worker == done.decode_worker:
                raise RuntimeError(f"{done.prefill_worker} has done all of the work")
            found.append(list(done.token_ids))
    return found, statistics.median(seconds[1:])

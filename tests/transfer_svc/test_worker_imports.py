"""What a worker's process has not imported when it is ready: each of these costs its start seconds or tenths of one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model_config import load_model_config

FORBIDDEN = (
    # Only for a config.json that was never read before.
    "transformers",
    "huggingface_hub",
    # Compilers that nothing here uses.
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "triton",
    "ray",
    # Only for what was not asked for: tokens of an issuer, a bar on a terminal, GGUF, HTTP.
    "jwt",
    "cryptography.x509",
    "rich",
    "gguf",
    "starlette",
    "pydantic.v1",
)
PROGRAM = """
import asyncio, sys
from pagewire.cli.app import build_app
build_app([])
import prefill_svc.main, decode_svc.main
from engine.worker_setup import load_engine
from pagewire.config import EngineOptions, WorkerConfig

async def serve(config, engine):
    app = make(config, engine)
    try:
        await app.start()
        await app.server.server.start()
    finally:
        await app.stop()

for role, make in (("prefill", prefill_svc.main.PrefillApp), ("decode", decode_svc.main.DecodeApp)):
    options = EngineOptions(model=sys.argv[1], kv_cache_memory_bytes=1 << 22)
    config = WorkerConfig(role=role, host="127.0.0.1", port=0, engine=options)
    engine = load_engine(options)
    asyncio.run(serve(config, engine))
    engine.close()
print(*sorted(set(sys.modules) & set(sys.argv[2:])))
"""


def test_a_worker_imports_nothing_that_it_does_not_use(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    model = tiny_model("llama")
    load_model_config(model)  # the first start of a model is another matter
    run = [sys.executable, "-c", PROGRAM, str(model), *FORBIDDEN]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr

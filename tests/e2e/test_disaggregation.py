"""Disaggregation itself, between real processes: blocks travel while P computes, D never prefills, routers share."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagewire import Client
from tests.e2e.cluster import Cluster
from tests.ports import free_ports

FLAGS = ("--dtype", "float32", "--kernels", "reference", "--block-size", "4", "--max-num-batched-tokens", "16",
         "--kv-cache-memory-bytes", str(8 << 20), "--cpu-threads", "1")  # fmt: skip


def wait_ready(client: Client) -> None:
    """Waits until the router knows a worker for each part of the work."""
    deadline = time.monotonic() + 20
    while not client.list_models()[0].ready:
        assert time.monotonic() < deadline, "no worker appeared"
        time.sleep(0.05)


def metrics(port: int) -> dict[str, float]:
    """Sums of a Prometheus page's samples by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_blocks_travel_while_prefill_runs_and_decode_never_prefills(
    tiny_model: Callable[..., Path], valkey_url: str
) -> None:
    base = free_ports(3)
    with Cluster(tiny_model("llama"), *FLAGS, "--metrics-port", str(base), redis_url=valkey_url) as cluster:
        with cluster.client() as client:
            for i in range(4):
                client.complete([(i + j) % 290 + 5 for j in range(400)], max_tokens=4, temperature=0, ignore_eos=True)
        cluster.wait_quiet()
        seen = [metrics(base + i) for i in range(3)]
        decode = max(seen, key=lambda m: m.get("pagewire:transfer_blocks_total", 0.0))
        assert decode["pagewire:transfer_blocks_total"] == 4 * 100
        # 25 chunks each: most blocks arrive before the last chunk was computed.
        assert decode["pagewire:transfer_overlap_blocks_total"] > 100
        assert decode["pagewire:prefill_tokens_on_decode_total"] == 0, "F10"


def test_two_routers_share_workers_and_index(tiny_model: Callable[..., Path], valkey_url: str) -> None:
    model = tiny_model("llama")
    with Cluster(model, *FLAGS, redis_url=valkey_url) as cluster:
        second = subprocess.Popen(
            [sys.executable, "-m", "pagewire", "router", "--model", str(model), "--port", "0",
             "--redis-url", valkey_url],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert second.stdout is not None
            line = second.stdout.readline()
            target = line.split()[-1]
            with Client(target) as two:
                wait_ready(two)
            prompt = [(3 * j) % 290 + 5 for j in range(33)]
            with cluster.client() as one, Client(target) as two:
                a = one.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
                cluster.wait_quiet()
                b = two.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
            assert a.token_ids == b.token_ids
            assert b.usage.cached_tokens == 32
        finally:
            second.terminate()
            assert second.wait(timeout=30) == 0
            second.stdout and second.stdout.close()
        cluster.wait_quiet()


def test_static_workers_without_redis(tiny_model: Callable[..., Path]) -> None:
    """No Redis anywhere: workers named on the command line still serve."""
    model = str(tiny_model("llama"))
    processes: list[subprocess.Popen[str]] = []
    try:
        endpoints = []
        for role in ("prefill", "decode"):
            process = subprocess.Popen(
                [sys.executable, "-m", "pagewire", role, "--model", model, "--port", "0", *FLAGS],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            endpoints.append(process.stdout.readline().split()[-1])
        router = subprocess.Popen(
            [sys.executable, "-m", "pagewire", "router", "--model", model, "--port", "0",
             "--prefill-workers", endpoints[0], "--decode-workers", endpoints[1]],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(router)
        assert router.stdout is not None
        with Client(router.stdout.readline().split()[-1]) as client:
            wait_ready(client)
            done = client.complete("hello", max_tokens=6, temperature=0, ignore_eos=True)
        assert len(done.token_ids) == 6
    finally:
        for process in reversed(processes):
            process.terminate()
        codes = [process.wait(timeout=40) for process in reversed(processes)]
        for process in processes:
            process.stdout and process.stdout.close()
    assert codes == [0, 0, 0]


def test_workers_share_the_pages_of_the_weights(tiny_model: Callable[..., Path], valkey_url: str) -> None:
    """P and D map the same file and never write to it, so its pages exist once."""
    model = tiny_model("gemma3")
    with Cluster(model, *FLAGS, redis_url=valkey_url) as cluster:
        with cluster.client() as client:
            client.complete("hello", max_tokens=4, temperature=0)
        assert cluster.process is not None
        workers = [
            child
            for child in psutil.Process(cluster.process.pid).children(recursive=True)
            if {"prefill", "decode"} & set(child.cmdline())
        ]
        assert len(workers) == 2
        for worker in workers:
            maps = [m for m in worker.memory_maps(grouped=False) if m.path == str(model / "model.safetensors")]
            assert maps, "the weights are not mapped"
            assert sum(m.private_dirty for m in maps) == 0


@pytest.mark.nightly
def test_two_systems_on_one_redis_are_one(tiny_model: Callable[..., Path], valkey_url: str) -> None:
    """Two `pagewire up` of the same model on one Redis share their workers; either may end without harm."""
    model = tiny_model("qwen2")
    prompt = [(5 * j) % 290 + 5 for j in range(30)]
    with Cluster(model, *FLAGS, redis_url=valkey_url) as one:
        with Cluster(model, *FLAGS, redis_url=valkey_url) as two:
            deadline = time.monotonic() + 20
            while not len({w.worker_id for w in one.workers()}) == len({w.worker_id for w in two.workers()}) == 4:
                assert time.monotonic() < deadline, (one.workers(), two.workers())
                time.sleep(0.05)
            answers = []
            for cluster in (one, two):
                with cluster.client() as client:
                    answers.append(client.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True).token_ids)
            two.wait_quiet()
        with one.client() as client:
            answers.append(client.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True).token_ids)
        assert answers[0] == answers[1] == answers[2]
        one.wait_quiet()

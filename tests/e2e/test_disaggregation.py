"""Disaggregation itself, between real processes: blocks travel while P computes, D never prefills, routers share."""

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagewire import Client
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.e2e.cluster import Cluster

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
    zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path
) -> None:
    with System.forked(zygote, tiny_model("llama"), tmp_path, *FLAGS, redis_url=valkey_url) as cluster:
        with cluster.client() as client:
            for i in range(4):
                client.complete([(i + j) % 290 + 5 for j in range(400)], max_tokens=4, temperature=0, ignore_eos=True)
        cluster.wait_quiet()
        decode = metrics(cluster["decode-0"].metrics_port)
        assert decode["pagewire:transfer_blocks_total"] == 4 * 100
        # 25 chunks each: most blocks arrive before the last chunk was computed.
        assert decode["pagewire:transfer_overlap_blocks_total"] > 100
        assert decode["pagewire:prefill_tokens_on_decode_total"] == 0, "F10"
        cluster.stop()


def test_two_routers_share_workers_and_index(
    zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path
) -> None:
    with System.forked(zygote, tiny_model("llama"), tmp_path, *FLAGS, redis_url=valkey_url) as cluster:
        second = cluster.add_router("second")
        cluster.start("second")
        with Client(second.endpoint) as two:
            wait_ready(two)
        prompt = [(3 * j) % 290 + 5 for j in range(33)]
        with cluster.client() as one, Client(second.endpoint) as two:
            a = one.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
            cluster.wait_quiet()
            b = two.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
        assert a.token_ids == b.token_ids
        assert b.usage.cached_tokens == 32
        assert second.terminate() == 0
        cluster.wait_quiet()
        cluster.stop()


def test_static_workers_without_redis(zygote: Zygote, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """No Redis anywhere: workers named on the command line still serve."""
    with System(zygote, tiny_model("llama"), tmp_path) as system:
        prefill = system.add_worker("prefill", "p0", *FLAGS)
        decode = system.add_worker("decode", "d0", *FLAGS)
        system.add_router("r0", "--prefill-workers", prefill.endpoint, "--decode-workers", decode.endpoint)
        system.start()
        with system.client() as client:
            wait_ready(client)
            done = client.complete("hello", max_tokens=6, temperature=0, ignore_eos=True)
        assert len(done.token_ids) == 6
        system.stop()


def test_workers_share_the_pages_of_the_weights(
    zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path
) -> None:
    """P and D map the same file and never write to it, so its pages exist once."""
    model = tiny_model("gemma3")
    with System.forked(zygote, model, tmp_path, *FLAGS, redis_url=valkey_url) as cluster:
        with cluster.client() as client:
            client.complete("hello", max_tokens=4, temperature=0)
        for name in ("prefill-0", "decode-0"):
            worker = psutil.Process(cluster[name].pid)
            maps = [m for m in worker.memory_maps(grouped=False) if m.path == str(model / "model.safetensors")]
            assert maps, "the weights are not mapped"
            assert sum(m.private_dirty for m in maps) == 0
        cluster.wait_quiet()
        cluster.stop()


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

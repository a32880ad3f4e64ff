"""KV moves to the work, between real processes: a chat whose turns run on other workers each time."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference
from tests.e2e.cluster import Cluster
from tests.e2e.test_disaggregation import FLAGS, metrics

NUM_TURNS = 4


def wait_for_the_routers_view(cluster: Cluster) -> None:
    """The index equals what workers hold, and the router has followed it."""
    cluster.wait_quiet()
    held = sum(cluster.worker_status(worker).num_cached_blocks for worker in cluster.workers())
    deadline = time.monotonic() + 20
    with grpc.insecure_channel(cluster.target) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).num_indexed_blocks != held:
            assert time.monotonic() < deadline, "the router's view does not follow"
            time.sleep(0.05)


@pytest.mark.parametrize("mode", ["always", pytest.param("auto", marks=pytest.mark.nightly)])
def test_no_turn_recomputes_what_a_live_worker_holds(
    zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path, mode: str
) -> None:
    """Round robin sends every turn to workers that have not seen the last one.

    What is computed all the same a counter of the worker that does it excuses: with `auto` if computing was cheaper.
    """
    model = tiny_model("llama")
    fetch = ("--kv-fetch", mode)
    flags, routing = (*FLAGS, *fetch, "--kv-fetch-min-tokens", "1"), (*fetch, "--policy", "round_robin")
    history = random_prompt(41, 1)
    with (
        System.forked(
            zygote, model, tmp_path, *flags, redis_url=valkey_url, prefill=2, decode=2, router=routing
        ) as cluster,
        cluster.client() as client,
    ):
        ports = [each.metrics_port for each in cluster.services.values() if each.role != "router"]
        routers = cluster["router"].metrics_port

        def count(name: str) -> float:
            return sum(metrics(port).get(f"pagewire:{name}_total", 0.0) for port in ports)

        computed, recomputed, duplicate, num_held, num_hits, workers = 0.0, 0.0, 0.0, 0, 0.0, set()
        for turn in range(NUM_TURNS):
            ((expected,),) = reference(model, [(history, greedy(11))], num_blocks=128)
            done = client.complete(history, max_tokens=11, temperature=0, ignore_eos=True)
            assert list(done.token_ids) == expected
            workers |= {done.prefill_worker, done.decode_worker}
            wait_for_the_routers_view(cluster)
            newly = count("computed_prompt_tokens") - computed
            excused = count("unfetched_tokens") - recomputed
            assert newly <= len(history) - num_held + excused, f"turn {turn}"
            # The router says the same of its own: what a live worker had and nobody fetched.
            again = metrics(routers)["pagewire:duplicate_prefill_tokens_total"] - duplicate
            assert again == max(0, num_held - done.usage.cached_tokens) <= excused, f"turn {turn}"
            computed, recomputed, duplicate = computed + newly, recomputed + excused, duplicate + again
            num_hits += done.usage.cached_tokens
            # The last output token was never fed back, so its KV is nowhere.
            num_held = (len(history) + len(expected) - 1) // BLOCK_SIZE * BLOCK_SIZE
            history += [*expected, *random_prompt(7, 2 + turn)]
        assert len(workers) == 4
        router = metrics(routers)
        assert router["pagewire:index_blocks"] == sum(
            cluster.worker_status(worker).num_cached_blocks for worker in cluster.workers()
        )
        assert router["pagewire:index_lag_seconds"] >= 0
        assert router["pagewire:stale_hits_total"] == 0
        assert router["pagewire:hit_tokens_total"] == num_hits
        if mode == "always":
            assert count("fetched_tokens") >= 2 * BLOCK_SIZE, "turns moved, and so did their KV"
        cluster.stop()

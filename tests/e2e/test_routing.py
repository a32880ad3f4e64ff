"""Routing on real processes: what ExplainRoute promises is what a request then finds."""

import subprocess
import sys

from pagewire import rpc
from pagewire.request_builder import build_generate_request
from pagewire.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.e2e.cluster import Cluster


def test_the_index_promises_what_the_worker_has(cluster: Cluster) -> None:
    """No stale hits after quiescence, whatever was computed, evicted or reset before."""
    prompts = [[(7 * j + 11 * n) % 290 + 5 for j in range(20 + 9 * n)] for n in range(5)]
    with cluster.client() as client, rpc.sync_channel(cluster.target) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        def promised(prompt: list[int], salt: str = "") -> int:
            """Tokens that the prefill worker has, by the index."""
            request = build_generate_request(prompt, max_tokens=4, cache_salt=salt)
            answer = admin.ExplainRoute(admin_pb2.ExplainRouteRequest(request=request), timeout=30)
            assert answer.reason == "disaggregated"
            prefill = [each for each in answer.workers if each.role == types_pb2.WORKER_ROLE_PREFILL]
            assert [each.worker_id for each in prefill] == [answer.prefill_worker]
            return min(4 * prefill[0].num_indexed_blocks, len(prompt) - 1)

        for prompt in (*prompts, *reversed(prompts)):
            cluster.wait_quiet()
            expected = promised(prompt)
            assert promised(prompt) == expected  # asking has changed nothing
            assert client.complete(prompt, max_tokens=4, temperature=0).usage.cached_tokens == expected
        cluster.wait_quiet()
        assert promised(prompts[0]) == min(len(prompts[0]) // 4 * 4, len(prompts[0]) - 1)
        assert promised(prompts[0], salt="another tenant") == 0


def test_the_command_shows_it(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "pagewire", "explain-route", "abc", "--target", cluster.target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, header, *rows = done.stdout.splitlines()
    assert "policy prefix: prefill on" in first
    assert header.split()[:2] == ["worker", "role"]
    assert [row.split()[1] for row in rows] == ["prefill", "decode"]
    assert "uncached" in rows[0]

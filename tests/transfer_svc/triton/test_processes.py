"""`pagewire up` with pools the host can't see: real processes, Triton's interpreter in each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.oracle import clear_greedy
from tests.e2e.test_disaggregation import FLAGS, wait_ready
from tests.tiny_models import VOCAB_SIZE


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plane", ["auto", "tcp", "grpc"])
def test_one_prefill_one_decode(tiny_model: Callable[..., Path], plane: str) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    oracle = clear_greedy(model, 30, 4, vocab=VOCAB_SIZE, seed=4)
    flags = (*FLAGS, "--kernels", "triton", "--kv-transfer", plane, "--kv-offloading-size", "1MiB")
    with Cluster(model, *flags) as cluster, cluster.client() as client:
        wait_ready(client)
        for _ in range(2):
            done = client.complete(list(oracle.prompt), max_tokens=4, temperature=0, ignore_eos=True)
            assert tuple(done.token_ids) == oracle.output
        assert done.prefill_worker != done.decode_worker
        cluster.wait_quiet()

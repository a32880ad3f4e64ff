"""A Ray cluster of two nodes on this machine, in a process of its own: Ray reads its token when it is imported."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_MARK = "the cluster is at "


@contextmanager
def two_nodes() -> Iterator[None]:
    """At $RAY_ADDRESS, with a token. The second node alone has CPUs; who joins is on the first one."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with (
        patch.dict(os.environ, token),
        subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        address = next(line for line in process.stdout if line.startswith(_MARK)).removeprefix(_MARK).strip()
        try:
            with patch.dict(os.environ, {"RAY_ADDRESS": address}):
                yield
        finally:
            process.stdin.close()
            process.wait(60)


def main() -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        cluster.add_node(num_cpus=2, **small)
        print(f"{_MARK}{cluster.address}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()

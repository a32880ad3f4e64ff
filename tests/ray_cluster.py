"""A Ray cluster of two nodes on this machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def two_nodes() -> Iterator[None]:
    """At $RAY_ADDRESS, with a token. The second node alone has CPUs; who joins is on the first one."""
    from ray.cluster_utils import Cluster

    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    small = {"object_store_memory": 80 << 20}
    with patch.dict(os.environ, token):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        try:
            cluster.add_node(num_cpus=2, **small)
            with patch.dict(os.environ, {"RAY_ADDRESS": cluster.address}):
                yield
        finally:
            cluster.shutdown()

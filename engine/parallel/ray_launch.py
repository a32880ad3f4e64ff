"""Ranks as actors of a Ray cluster, all on this machine: they share the KV pool's memory with rank 0."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine.model_config import ModelError
from engine.parallel.launch import Arrival
from engine.parallel.named_socket import RankListener

_RAY_VERSION = (2, 60)
_LOOPBACK = "127.0.0.1"
_MODE = "RAY_AUTH_MODE"
_SEVERAL_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's name for whether nodes may be on several machines; off, it takes the loopback address on Linux too."""

logger = logging.getLogger(__name__)


class RayActor:
    """An actor whose one method runs a rank; its process ends with the rank."""

    def __init__(self, ray: Any, actor: Any, running: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._running = running

    def how_it_ended(self, timeout: float) -> str | None:
        ready, _ = self._ray.wait([self._running], timeout=timeout)
        if not ready:
            return None
        try:
            self._ray.get(self._running)
        except Exception as error:
            return f"Ray: {' '.join(str(error).split())[:300]}"
        return "its method returned"

    def kill(self) -> None:
        with suppress(Exception):  # it is dead already, or the cluster is
            self._ray.kill(self._actor)
        self._ray.wait([self._running], timeout=10.0)


class RayActors:
    """The launcher `ray`: joins the cluster at $RAY_ADDRESS, else starts one for this process, on loopback alone.

    Raises ModelError without Ray, if what it starts would be open to others, or if this machine's node has fewer CPUs
    than actors.
    """

    def __init__(self, size: int) -> None:
        self._ray = _import_ray()
        self._listener = RankListener()
        self._has_started = not self._ray.is_initialized()
        try:
            if self._has_started:
                self._init(size)
            self._node = self._find_node(size)
        except BaseException:
            self.close()
            raise

    def _init(self, size: int) -> None:
        common: dict[str, Any] = {"namespace": "pagewire", "logging_level": logging.WARNING}
        if address := os.environ.get("RAY_ADDRESS"):
            self._ray.init(address, **common)
            return
        if (mode := os.environ.get(_MODE, "token")) != "token":
            raise ModelError(
                f"distributed_executor_backend = ray: {_MODE} = {mode} would let anybody on this machine run code in "
                "the cluster that is started here; unset it, or start a cluster and name it in RAY_ADDRESS"
            )
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            # Ray remembers it until this process ends. Its own would be a file that others may be able to read.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        with _one_node():
            self._ray.init("local", num_cpus=size - 1, include_dashboard=False, _node_ip_address=_LOOPBACK, **common)
        if (found := self._ray.util.get_node_ip_address()) != _LOOPBACK:
            raise ModelError(
                f"distributed_executor_backend = ray: Ray has started a cluster that listens at {found}, where others "
                f"can reach it, not at {_LOOPBACK}; start a cluster and name it in RAY_ADDRESS"
            )
        if os.environ.get(_MODE) != "token":
            raise ModelError("distributed_executor_backend = ray: Ray has started a cluster without authentication")

    def _find_node(self, size: int) -> str:
        node_id: str = self._ray.get_runtime_context().get_node_id()
        num_cpus = next(node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["NodeID"] == node_id)
        if num_cpus < size - 1:
            raise ModelError(
                f"distributed_executor_backend = ray: tensor_parallel_size = {size} needs {size - 1} actors on this "
                f"machine, whose node has {num_cpus:g} CPUs; ranks on other machines are not supported yet"
            )
        return node_id

    def start(self, rank: int) -> RayActor:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        actor = self._ray.remote(_Rank).options(num_cpus=1, max_restarts=0, scheduling_strategy=here).remote()
        return RayActor(self._ray, actor, actor.run.remote(self._listener.address, self._listener.token, rank))

    def accept(self, timeout: float) -> Arrival | None:
        return self._listener.accept(timeout)

    def close(self) -> None:
        """Ends the cluster if it was started here."""
        self._listener.close()
        if self._has_started and self._ray.is_initialized():
            self._ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ModelError(
            f"distributed_executor_backend = ray needs Ray, which is not installed ({error}): pip install pagewire[ray]"
        ) from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < _RAY_VERSION:
        raise ModelError(
            f"distributed_executor_backend = ray needs Ray {_RAY_VERSION[0]}.{_RAY_VERSION[1]} or newer, whose local "
            f"cluster is known to ask for a token; {ray.__version__} is installed"
        )
    return ray


@contextmanager
def _one_node() -> Iterator[None]:
    """Ray takes no loopback address where a cluster may have several nodes. What it starts inherits the variable, which
    this process has read on import.
    """
    from ray._private import ray_constants

    before = os.environ.get(_SEVERAL_NODES), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_SEVERAL_NODES], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[_SEVERAL_NODES]
        variable, ray_constants.ENABLE_RAY_CLUSTER = before
        if variable is not None:
            os.environ[_SEVERAL_NODES] = variable


class _Rank:
    """Runs in the actor's process."""

    def run(self, address: str, token: bytes, rank: int) -> None:
        from engine.parallel.named_socket import connect_rank
        from engine.parallel.rank import run_rank

        run_rank(connect_rank(address, token, rank), rank)

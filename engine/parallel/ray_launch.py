"""Ranks as actors of a Ray cluster, on this node, where they share the KV pool's memory with rank 0, or on others."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine.errors import ModelError
from engine.parallel.launch import Arrival
from engine.parallel.named_socket import RankListener
from engine.parallel.network import NetworkListener
from engine.parallel.ray_placement import Placement, place

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

    Raises ModelError without Ray, if what it starts would be open to others, or if the nodes have fewer CPUs than there
    are actors.
    """

    def __init__(self, size: int, num_weight_bytes: int) -> None:
        self._ray = _import_ray()
        self._listener = RankListener()
        self._remote_listener: NetworkListener | None = None
        self._placement: Placement | None = None
        self._has_started = not self._ray.is_initialized()
        try:
            if self._has_started:
                self._init(size)
            self._placement = place(self._ray, size, num_weight_bytes)
            if any(self._placement.machines):
                self._remote_listener = NetworkListener(self._placement.host)
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

    @property
    def host(self) -> str:
        return self._placed.host

    @property
    def _placed(self) -> Placement:
        if self._placement is None:
            raise ValueError("the launcher is closed")
        return self._placement

    def machine(self, rank: int) -> str:
        return self._placed.machines[rank - 1]

    def start(self, rank: int) -> RayActor:
        listener = self._remote_listener if self.machine(rank) else self._listener
        if listener is None:
            raise ValueError("nobody listens for ranks on other machines")
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": self._placed.strategy(rank)}
        actor = self._ray.remote(_Rank).options(**options).remote()
        return RayActor(self._ray, actor, actor.run.remote(listener.address, listener.token, rank))

    def accept(self, timeout: float) -> Arrival | None:
        if self._remote_listener is None:
            return self._listener.accept(timeout)
        return self._listener.accept(timeout / 2) or self._remote_listener.accept(timeout / 2)

    def close(self) -> None:
        """Ends the cluster if it was started here."""
        self._listener.close()
        if self._remote_listener is not None:
            self._remote_listener.close()
        if self._placement is not None:
            with suppress(Exception):  # the cluster may be dead
                self._placement.close()
            self._placement = None
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

    def run(self, address: "str | tuple[str, int]", token: bytes, rank: int) -> None:
        """Serves rank 0, which listens at a socket of this machine or at a (host, port)."""
        from engine.parallel.named_socket import connect_rank
        from engine.parallel.network import connect_over_network
        from engine.parallel.rank import run_rank

        if isinstance(address, str):
            run_rank(connect_rank(address, token, rank), rank)
        else:
            run_rank(connect_over_network(address, token, rank), rank)

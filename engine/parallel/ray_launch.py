"""Ranks as actors of a Ray cluster, all on this machine: they share the KV pool's memory with rank 0."""

import logging
import os
from contextlib import suppress
from typing import Any

from engine.model_config import ModelError

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
    """The launcher `ray`: joins the cluster at $RAY_ADDRESS, else starts one for this process.

    Raises ModelError without Ray, or if this machine's node has fewer CPUs than actors.
    """

    def __init__(self, size: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ModelError(
                f"distributed_executor_backend = ray needs Ray, which is not installed ({error}): "
                "pip install pagewire[ray]"
            ) from None
        self._ray: Any = ray
        self._has_started = not ray.is_initialized()
        if self._has_started:
            address = os.environ.get("RAY_ADDRESS")
            own: dict[str, Any] = {"num_cpus": size - 1, "include_dashboard": False}
            ray.init(
                address or "local", namespace="pagewire", logging_level=logging.WARNING, **({} if address else own)
            )
        self._node = ray.get_runtime_context().get_node_id()
        num_cpus = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == self._node)
        if num_cpus < size - 1:
            self.close()
            raise ModelError(
                f"distributed_executor_backend = ray: tensor_parallel_size = {size} needs {size - 1} actors on this "
                f"machine, whose node has {num_cpus:g} CPUs; ranks on other machines are not supported yet"
            )

    def start(self, rank: int, address: str, token: bytes) -> RayActor:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_id=self._node, soft=False)
        actor = self._ray.remote(_Rank).options(num_cpus=1, max_restarts=0, scheduling_strategy=here).remote()
        return RayActor(self._ray, actor, actor.run.remote(address, token, rank))

    def close(self) -> None:
        """Ends the cluster if it was started here."""
        if self._has_started and self._ray.is_initialized():
            self._ray.shutdown()


class _Rank:
    """Runs in the actor's process."""

    def run(self, address: str, token: bytes, rank: int) -> None:
        from engine.parallel.rank import run_rank

        run_rank(address, token, rank)

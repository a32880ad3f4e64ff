"""What `pagewire up` runs: a validated configuration for each process."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.cli.model import resolve_model
from pagewire.config import (
    EngineOptions,
    ProcessConfig,
    RouterConfig,
    WorkerConfig,
    load_config,
    option_names,
    with_model,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to run, with their configurations, in the order in which they start."""

    router: RouterConfig
    workers: Mapping[str, WorkerConfig]

    @property
    def configs(self) -> dict[str, tuple[str, ProcessConfig]]:
        """(role, configuration) by process name."""
        return {
            **{name: (worker.role, worker) for name, worker in self.workers.items()},
            "router": ("router", self.router),
        }

    @property
    def take_turns(self) -> bool:
        """Each worker's kernels use every core, so that two steps at once would be in each other's way."""
        num_cores = len(os.sched_getaffinity(0))
        threads = [worker.engine.cpu_threads or num_cores for worker in self.workers.values()]
        on_cpu = all(worker.engine.device == "cpu" for worker in self.workers.values())
        return on_cpu and len(threads) > 1 and min(threads) >= num_cores > 1


def make_plan(flags: dict[str, Any], file: Path | None, num_prefill: int, num_decode: int) -> Plan:
    """Reads and validates everything; raises ConfigError, or CommandFailed if the model cannot be had."""
    names = [("prefill", n) for n in range(num_prefill)] + [("decode", n) for n in range(num_decode)]
    count = len(names)
    router = load_config(RouterConfig, _known(RouterConfig, flags), file, os.environ)
    fixed: dict[str, object] = {"host": "127.0.0.1", "port": 0, "kv_transfer_port": 0, "model": router.model}
    decode = load_config(WorkerConfig, {**_known(WorkerConfig, flags), **fixed, "role": "decode"}, file, os.environ)
    router = with_model(router, lambda name, _: resolve_model(name, decode.engine.dtype))
    fixed |= {"model": router.model, "served_model_name": router.served_model_name}
    # An index of one's own may be shared with other systems: worker ids are unique in it.
    suffix = "" if router.redis_url is None else f"-{secrets.token_hex(3)}"
    workers = {}
    for number, (role, index) in enumerate(names):
        name = f"{role}-{index}"
        own: dict[str, object] = {"role": role, "worker_id": name + suffix}
        if router.metrics_port is not None:
            own["metrics_port"] = router.metrics_port + 1 + number if router.metrics_port else 0
        worker = load_config(WorkerConfig, {**_known(WorkerConfig, flags), **fixed, **own}, file, os.environ)
        engine = worker.engine.model_copy(update=_share_of_machine(worker.engine, count))
        workers[name] = worker.model_copy(update={"engine": engine})
    return Plan(router, workers)


def _known(cls: type[ProcessConfig], flags: dict[str, Any]) -> dict[str, Any]:
    known = option_names(cls)
    return {name: value for name, value in flags.items() if name in known}


def _share_of_machine(engine: EngineOptions, count: int) -> dict[str, float]:
    """Threads, where the user did not choose, and memory for one of `count` workers: all pools share one share."""
    share: dict[str, float] = {
        "kv_cache_memory_share": engine.kv_cache_memory_share / count,
        "gpu_memory_utilization": engine.gpu_memory_utilization / count,
    }
    if engine.cpu_threads == 0:
        share["cpu_threads"] = max(1, len(os.sched_getaffinity(0)) // count)
    return share


def with_index(plan: Plan, redis_url: str) -> Plan:
    """The same, with every process using that index."""
    change = {"redis_url": redis_url}
    return Plan(
        plan.router.model_copy(update=change),
        {name: worker.model_copy(update=change) for name, worker in plan.workers.items()},
    )

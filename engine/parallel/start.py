"""Starts the other ranks of an engine, if its options ask for several."""

import os

from engine.parallel.config import check_parallel
from engine.parallel.launch import ChildProcesses, Launcher
from engine.parallel.ranks import Ranks
from pagewire.config import EngineOptions


def start_ranks(options: EngineOptions) -> Ranks | None:
    """None with one rank. Raises ModelError, before anything is started, for what can't be shared out."""
    if options.tensor_parallel_size == 1:
        return None
    check_parallel(options)
    return Ranks(options, _launcher(options), share_of_threads(options))


def share_of_threads(options: EngineOptions) -> int:
    """A rank's part of `cpu_threads`, or of the CPUs that this process may use; at least one."""
    threads = options.cpu_threads or len(os.sched_getaffinity(0))
    return max(1, threads // options.tensor_parallel_size)


def _launcher(options: EngineOptions) -> Launcher:
    if options.distributed_executor_backend == "mp":
        return ChildProcesses()
    from engine.parallel.ray_launch import RayActors

    return RayActors(options.tensor_parallel_size)

"""Starts the other ranks of an engine, if its options ask for several."""

from pathlib import Path

from engine.parallel.config import check_parallel
from engine.parallel.devices import check_devices
from engine.parallel.launch import ChildProcesses, Launcher
from engine.parallel.ranks import Ranks
from pagewire.config import EngineOptions


def start_ranks(options: EngineOptions) -> Ranks | None:
    """None with one rank. Raises ModelError, before anything is started, for what can't be shared out."""
    if options.tensor_parallel_size == 1:
        return None
    check_parallel(options)
    check_devices(options)
    return Ranks(options, _launcher(options))


def _launcher(options: EngineOptions) -> Launcher:
    if options.distributed_executor_backend == "mp":
        return ChildProcesses()
    from engine.parallel.ray_launch import RayActors

    return RayActors(options.tensor_parallel_size, _num_weight_bytes(Path(options.model)))


def _num_weight_bytes(model: Path) -> int:
    """Of all files of a model, as they are stored."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)

"""How much of a GPU's memory the KV pool gets: what `gpu_memory_utilization` allows, less what all else takes.

allowed      total · utilization                       one process's share; several may divide a GPU
weights      what tensors take after loading
activations  what the largest steps take beyond that (`largest_steps`), measured by running them
other        what this process has taken that is no tensor: modules of kernels, workspaces of libraries
staging      the lanes through which blocks come and go (`engine.device_staging`)
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import EngineError
from engine.sizing import PoolBudget

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """Bytes of one device and of this process's tensors on it."""

    def uuid(self) -> str: ...
    def total(self) -> int: ...
    def free(self) -> int:
        """Whoever takes the rest."""
        ...

    def allocated(self) -> int:
        """What tensors take now."""
        ...

    def reserved(self) -> int:
        """What torch holds for tensors, at least `allocated`."""
        ...

    def peak(self) -> int:
        """The most that tensors took since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...
    def give_back(self) -> None:
        """What torch holds and no tensor takes goes back to the device; waits for what runs there."""
        ...


class CudaMemory:
    """Of a GPU, by torch's figures."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def open_device_memory(device: torch.device) -> DeviceMemory | None:
    """None for the CPU, whose memory the system shares out."""
    return None if device.type == "cpu" else CudaMemory(device)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """In bytes; `free` is what the device has left, when no step runs."""

    total: int
    free: int
    weights: int
    activations: int
    other: int


class DeviceProfile:
    """Made before the model is loaded; nobody else may start on the device from then on (`engine.device_turn`)."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._free_at_start = device.free()

    def measure(self, run_largest_steps: Callable[[], object]) -> DeviceUse:
        """When the model is loaded."""
        device = self._device
        device.give_back()
        weights = device.allocated()
        device.reset_peak()
        run_largest_steps()
        device.give_back()
        free = device.free()
        taken = max(0, self._free_at_start - free)
        return DeviceUse(device.total(), free, weights, device.peak() - weights, max(0, taken - device.reserved()))


def pool_budget(
    use: DeviceUse, utilization: float, staging: int, max_num_batched_tokens: int, graphs: int = 0
) -> PoolBudget:
    """What the pool may take. Raises EngineError if nothing is left."""
    allowed = int(use.total * utilization)
    rest = allowed - use.weights - use.activations - use.other - staging - graphs
    there = use.free - use.activations - staging - graphs
    parts = (
        f"weights {_gib(use.weights)}, activations of the largest steps (max_num_batched_tokens = "
        f"{max_num_batched_tokens}) {_gib(use.activations)}, staging {_gib(staging)}, other {_gib(use.other)}"
        + (f", CUDA graphs {_gib(graphs)}" if graphs else "")
    )
    source = f"gpu_memory_utilization = {utilization:g}: {_gib(allowed)} of {_gib(use.total)}"
    if rest <= 0:
        raise EngineError(f"{source} leaves no room for the KV pool beside {parts}")
    if there <= 0:
        raise EngineError(
            f"{source}, but only {_gib(use.free)} are free beside {_gib(use.weights)} of weights: {parts}"
        )
    if there < rest:
        logger.warning("%s, but other processes leave the KV pool only %s", source, _gib(there))
    logger.info("%s; %s", source, parts)
    return PoolBudget(min(rest, there), source)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

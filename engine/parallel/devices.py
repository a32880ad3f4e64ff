"""Ranks whose kernels run on devices: which device a rank has, and what the ranks say to each other from there.

Each rank has a device and on it a pool of its own heads, as ranks on other machines have (`remote_kv.py`). What they
say goes through the host: a group adds and gathers there, in the order of the ranks, whatever the devices are.
"""

from functools import partial

import torch
from torch import Tensor

from engine.device_memory import open_device_memory
from engine.errors import ModelError
from engine.kernel_set import ModelKernels
from engine.memory import KvLayout
from engine.model_config import ModelConfig
from engine.parallel.group import RankGroup
from engine.runner import Place, as_it_is
from engine.sizing import available_memory
from pagewire.config import EngineOptions


def check_devices(options: EngineOptions) -> None:
    """Raises ModelError, before anything is loaded, if there are some but fewer than ranks."""
    there, size = torch.cuda.device_count(), options.tensor_parallel_size
    if options.device != "cpu" and 0 < there < size:  # that there is none is said with its reason, by `load_kernel_set`
        raise ModelError(f"tensor_parallel_size = {size}: each rank needs a GPU, and torch sees {there}")


def take_device(options: EngineOptions, rank: int) -> str:
    """The device of this process, a rank, for its kernels."""
    if options.device == "cpu" or not torch.cuda.is_available():
        return options.device
    torch.cuda.set_device(rank)
    return f"{options.device}:{rank}"


def free_memory(device: torch.device, utilization: float) -> int:
    """Bytes that a rank's pool may take: of the host, or that share of a GPU less what is taken there."""
    memory = open_device_memory(device)
    if memory is None:
        return available_memory()
    total, free = memory.total(), memory.free()
    return max(0, int(total * utilization) - (total - free))


def placing(kernels: ModelKernels, config: ModelConfig, layout: KvLayout) -> Place:
    """What makes of a step's batch what the kernels take. `config`: of what runs here, maybe a part of the model."""
    if kernels.NAME != "triton":
        return as_it_is
    from kernels.triton.step_batch import place

    fp8 = layout.kv_format is not None
    return partial(place, group_size=config.group_size, head_dim=config.head_dim, device=kernels.device, fp8=fp8)


def between_devices(group: RankGroup, kernels: ModelKernels) -> RankGroup:
    """For tensors where the kernels have them."""
    return ThroughHost(group) if kernels.NAME == "triton" else group


class ThroughHost:
    """A RankGroup of tensors on devices; of the CPU's, as in the interpreter, no copies are made."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        return self._group.sum(x.cpu()).to(x.device)

    def gather(self, x: Tensor) -> Tensor | None:
        parts = self._group.gather(x.cpu())
        return None if parts is None else parts.to(x.device)

    def gather_all(self, x: Tensor) -> Tensor:
        return self._group.gather_all(x.cpu()).to(x.device)

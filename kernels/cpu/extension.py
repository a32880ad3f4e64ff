"""Finds the compiled extension and picks its instruction set."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MODULE = "pagewire_kernels_cpu"
ABI = 10


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No native kernels. `wanted`: because PAGEWIRE_CPU_ISA says so."""

    reason: str
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class Extension:
    """The compiled module with `isa` in use. The module takes addresses and shapes; kernels/cpu/native.py calls it."""

    module: Any
    isa: str

    def configure_threads(self, num_threads: int, cpus: Sequence[int] = (), *, spin_microseconds: int = 100) -> None:
        """Size the pool all ops run on. Thread i > 0 is bound to cpus[i]; thread 0 is whoever calls an op.

        Between ops threads wait awake for `spin_microseconds`, then asleep. Results don't depend on any of this.
        """
        self.module.configure(num_threads, list(cpus), spin_microseconds * 1000)

    @property
    def num_threads(self) -> int:
        return int(self.module.num_threads())


def find_extension(forced: str) -> Extension | Unavailable:
    """Load the module with the instruction set `forced`, or the best that runs here if it is ""."""
    if forced == "torch":
        return Unavailable("PAGEWIRE_CPU_ISA is torch", wanted=True)
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        return Unavailable(f"the package pagewire-kernels-cpu is not installed or does not load ({error})")
    if getattr(module, "ABI", None) != ABI:
        return Unavailable(
            f"pagewire-kernels-cpu has interface {getattr(module, 'ABI', 'unknown')}, but this pagewire needs {ABI}: "
            "reinstall it"
        )
    obstacles = {}
    for name, obstacle, emulated in module.isas():
        if not obstacle and (name == forced or not (forced or emulated)):
            module.use(name)
            module.configure(len(os.sched_getaffinity(0)), [], 100_000)
            return Extension(module, name)
        obstacles[name] = obstacle
    if forced and forced not in obstacles:
        return Unavailable(f"PAGEWIRE_CPU_ISA={forced} is not known; known are {', '.join(obstacles)} and torch")
    if forced:
        return Unavailable(f"PAGEWIRE_CPU_ISA={forced}: {obstacles[forced]}")
    return Unavailable(f"no instruction set runs here: {'; '.join(filter(None, obstacles.values()))}")

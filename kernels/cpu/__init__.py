"""Native CPU kernels: found when the distribution `pagewire-kernels-cpu` is installed and the processor can run them.

The variable PAGEWIRE_CPU_ISA forces an instruction set (amx, avx512_bf16, avx512_vnni, avx512, avx2),
or `torch` for none.
"""

import os
import warnings
from functools import cache

from kernels.cpu.extension import Extension, Unavailable, find_extension

__all__ = ["Extension", "Unavailable", "available", "load", "warn_if_unavailable", "why_unavailable"]


@cache
def _found() -> Extension | Unavailable:
    return find_extension(os.environ.get("PAGEWIRE_CPU_ISA", ""))


def available() -> bool:
    """Whether `load` gives kernels."""
    return isinstance(_found(), Extension)


def why_unavailable() -> str:
    """The reason, or "" when they are available."""
    found = _found()
    return found.reason if isinstance(found, Unavailable) else ""


def load() -> Extension:
    """The extension, with its instruction set in use. Raises ImportError with the reason if there is none."""
    found = _found()
    if isinstance(found, Unavailable):
        raise ImportError(f"native CPU kernels are not available: {found.reason}")
    return found


@cache
def warn_if_unavailable() -> None:
    """Say, once in a process, why the torch kernels run instead; nothing if PAGEWIRE_CPU_ISA asked for them."""
    found = _found()
    if isinstance(found, Unavailable) and not found.wanted:
        warnings.warn(f"running on the slower torch kernels: {found.reason}", RuntimeWarning, stacklevel=2)

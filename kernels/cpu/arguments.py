"""Tensors as the extension takes them."""

from torch import Tensor

from kernels.cpu.packed import DTYPES


def code(x: Tensor) -> int:
    """Of its dtype."""
    return DTYPES[x.dtype]


def address(x: Tensor | None) -> int:
    """Where it begins; 0 for none."""
    return 0 if x is None else x.data_ptr()

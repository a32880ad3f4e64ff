"""Triton's interpreter: runs the kernels on CPU tensors with numpy, for tests and dry runs without a GPU.

`enable` comes before the first import of triton. It repairs what triton 3.6 to 3.9 do with bfloat16, which numpy lacks
and the interpreter keeps as uint16: `tl.dot` multiplied those bits as integers, and a float32 was cut off instead of
rounded to nearest even, as the device does. And it makes `tl.dot` give the same bits for the same numbers. (With numpy
2.4 and later the interpreter of 3.6 can't run a `range` over a loaded value; 3.9's can.) Threads launch one
after another: the interpreter has one grid position for all of them.
"""

import os
import sys
import threading
from typing import Any

import numpy as np


def enable() -> None:
    """Makes the kernels of this process run interpreted. Raises RuntimeError when triton was imported before."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            raise RuntimeError("triton was imported before its interpreter was enabled")
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton decorates a kernel
    _repair_bfloat16()
    _serialize()


def _serialize() -> None:
    from triton.runtime.interpreter import GridExecutor

    if getattr(GridExecutor, "serialized", False):
        return
    launch, turn = GridExecutor.__call__, threading.RLock()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = call
    GridExecutor.serialized = True


def _repair_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "bfloat16_repaired", False):
        return
    dot, truncate = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        a, b = widened(a), widened(b)
        if a.dtype.scalar != tl.float32 or d.data.dtype != np.float32:
            return dot(self, a, b, d, *args)
        # A BLAS adds up in an order that changes with where its operands lie; rounded from float64 that does not show.
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    def create_fp_trunc(self: Any, handle: Any, target: Any) -> Any:
        if handle.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return truncate(self, handle, target)
        bits = np.ascontiguousarray(handle.data).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        rounded = np.where(np.isnan(handle.data), 0x7FC0, rounded)
        return TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    InterpreterBuilder.bfloat16_repaired = True

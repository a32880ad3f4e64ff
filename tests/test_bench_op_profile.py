"""bench/op_profile.py names a product by its shape: where that is among the arguments of each op."""

import pytest
import torch

import kernels.cpu
from bench.op_profile import TimedModule
from kernels.cpu import Extension
from kernels.cpu.native import NativeKernels
from kernels.grouped import GroupedMatrix
from kernels.int8 import Quantization


@pytest.mark.skipif(bool(kernels.cpu.why_unavailable()), reason=kernels.cpu.why_unavailable())
def test_products_are_named_by_their_shape() -> None:
    x, weight = torch.ones(3, 64), torch.ones(48, 64)
    grouped = GroupedMatrix("int8", torch.ones(48, 64, dtype=torch.int8), torch.ones(48, 2), 32)
    found = kernels.cpu.load()
    kinds: dict[str, Quantization | None] = {"linear": None, "linear_int8": "int8", "linear_grouped": None}
    for op, quantization in kinds.items():
        timed = TimedModule(found.module)
        native = NativeKernels(Extension(timed, found.isa), quantization)
        native.linear(x, native.pack_groups(grouped, dtype=x.dtype) if op == "linear_grouped" else native.pack(weight))
        assert f"{op} x 48 x 64" in timed.seconds

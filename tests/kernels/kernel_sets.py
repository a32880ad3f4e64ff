"""The kernel sets under test, and the two dtypes each must be row-invariant in."""

import torch

from engine.kernel_set import KernelSet
from kernels import reference
from kernels.tiled import TiledKernels

KERNEL_SETS: dict[str, KernelSet] = {"reference": reference, "torch": TiledKernels(1)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# One rounding to the dtype, plus float32 arithmetic inside the op for "torch".
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}

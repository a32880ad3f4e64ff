"""Every native test runs on every instruction set this machine has, in float32 and bfloat16."""

from collections.abc import Iterator

import pytest
import torch

import kernels.cpu
from kernels.cpu.native import NativeKernels
from tests.kernels.cpu.harness import DTYPES, ISAS, kernels_for


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    """The kernel set on one instruction set, on two threads."""
    made = kernels_for(request.param)
    extension = kernels.cpu.load()
    extension.configure_threads(2)
    yield made
    extension.module.use(extension.isa)
    extension.configure_threads(1)


@pytest.fixture(params=DTYPES, ids=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest, native: NativeKernels) -> torch.dtype:
    if native.isa == "amx_emulated" and request.param == torch.float32:
        pytest.skip("float32 uses no tiles: the same code as on avx512_bf16")
    dtype: torch.dtype = request.param
    return dtype

"""Which sampler draws from the logits of a kernel set on the CPU; on a device `engine/device_runner.py` has its own."""

from typing import cast

from engine.kernel_set import ModelKernels
from engine.native_sampler import NativeSampler, SamplingKernels
from engine.sampler import RowSampler, Sampler


def sampler_for(kernels: ModelKernels, vocab_size: int) -> RowSampler:
    """The one that looks at logits while they are made, where the kernels can."""
    if kernels.NAME == "native":
        return NativeSampler(vocab_size, cast(SamplingKernels, kernels))
    return Sampler(vocab_size)

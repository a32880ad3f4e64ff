"""Which sampler draws from the logits of a kernel set."""

from typing import cast

from engine.kernel_set import ModelKernels
from engine.native_sampler import NativeSampler, SamplingKernels
from engine.sampler import RowSampler, Sampler


def sampler_for(kernels: ModelKernels, vocab_size: int) -> RowSampler:
    """The one that draws where the logits are made."""
    if kernels.NAME == "triton":
        from engine.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size)
    if kernels.NAME == "native":
        return NativeSampler(vocab_size, cast(SamplingKernels, kernels))
    return Sampler(vocab_size)

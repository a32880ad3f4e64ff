"""What the launchers must know of the device they run on."""

import torch

INTERPRETED_ARCH = 90
"""On CPU tensors the interpreter runs with the shapes of this one."""


def device_arch(device: torch.device) -> int:
    """The compute capability as a number: 80, 90, 100. Tile shapes follow from it; it is part of the numerics class."""
    if device.type != "cuda":
        return INTERPRETED_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor

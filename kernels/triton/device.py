"""What the launchers must know of the device they run on."""

import os
from importlib.util import find_spec

import torch

INTERPRETED_ARCH = 90
"""On CPU tensors the interpreter runs with the shapes of this one."""


def device_arch(device: torch.device) -> int:
    """The compute capability as a number: 80, 90, 100. Tile shapes follow from it; it is part of the numerics class."""
    if device.type != "cuda":
        return INTERPRETED_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def why_unavailable(device: torch.device) -> str:
    """What is missing to run on it, or "": triton, a GPU that torch sees, or the interpreter for CPU tensors."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'pagewire[gpu]'"
    if device.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch sees no GPU" if built else f"torch {torch.__version__} is built without CUDA"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU tensors need Triton's interpreter: TRITON_INTERPRET=1 (slow, for tests)"
    return ""

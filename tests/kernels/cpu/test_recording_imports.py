"""What recording a step brings into a worker's memory."""

import subprocess
import sys

import pytest

from kernels import cpu

PROGRAM = """
import sys, torch
from kernels.cpu.extension import find_extension
from kernels.cpu.recording import record
x, y = torch.ones(2, 8), torch.ones(2, 8)
ops = find_extension("").module
with torch.inference_mode():
    record(ops, 2, [x], lambda: torch.empty(2, 8).view(2, 4, 2))
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_recording_imports_no_compiler() -> None:
    """torch's is 115 MB for each worker."""
    if not cpu.available():
        pytest.skip("no native kernels here")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"

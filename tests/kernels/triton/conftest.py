"""Turns Triton's interpreter on before anything imports triton; skips this folder, with the reason, without triton."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest

from kernels.triton import interpreter

if importlib.util.find_spec("triton") is not None:
    interpreter.enable()
else:

    class SkippedModule(pytest.Module):
        """A test file that is not imported."""

        def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
            pytest.skip("triton is not installed: pip install 'pagewire[gpu]'", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> SkippedModule:
        return SkippedModule.from_parent(parent, path=module_path)

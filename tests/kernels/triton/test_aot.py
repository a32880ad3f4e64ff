"""Kernels compiled ahead of time, without a GPU, against the checked-in table `bench/gpu/aot.csv`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def check(tmp_path: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one's triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "bench/gpu/aot.py", "--check", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_two_kernels_are_as_in_the_table(tmp_path: Path) -> None:
    kernels = ("--kernel", "decode_attention", "silu_and_mul", "--model", "Llama-3-8B", "--arch", "90")
    done = check(tmp_path, *kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kernels, no spills" in done.stdout


@pytest.mark.nightly
def test_a_change_goes_red(tmp_path: Path) -> None:
    """The same kernel against a table that says something else."""
    copy = tmp_path / "bench" / "gpu"
    copy.mkdir(parents=True)
    (copy / "aot.py").write_text((ROOT / "bench/gpu/aot.py").read_text())
    table = (ROOT / "bench/gpu/aot.csv").read_text()
    (copy / "aot.csv").write_text(
        table.replace("silu_and_mul/gated,Llama-3-8B,90,8,", "silu_and_mul/gated,Llama-3-8B,90,4,")
    )
    done = check(tmp_path, "--kernel", "silu_and_mul", "--model", "Llama-3-8B", "--arch", "90", cwd=tmp_path)
    assert done.returncode == 1
    assert "warps=4" in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_kernels_are_as_in_the_table(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

"""Which kernels run: asked for, forced by PAGEWIRE_CPU_ISA, or what there is; in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.kernel_set import load_kernel_set
from kernels import cpu

CODE = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
if {hidden}: sys.modules["pagewire_kernels_cpu"] = None
import torch
torch.set_num_threads(2)
from engine.kernel_set import load_kernel_set, numerics_class
from engine.errors import ModelError
for name in {names}:
    try:
        print(numerics_class(load_kernel_set(name, threads=2), torch.bfloat16), torch.get_num_threads())
    except ModelError as error:
        print(error)
"""
NATIVE = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())


def run(*names: str, isa: str, hidden: bool = False) -> tuple[str, str]:
    """(printed, logged) of a process that loads these kernel sets; `hidden`: without the extension."""
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(names=names, hidden=hidden)],
        env={**os.environ, "PAGEWIRE_CPU_ISA": isa},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr.strip()


@NATIVE
@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("auto", ""),
        *(("native", isa) for isa in ("avx2", "avx512", "amx")),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("auto", "amx"), ("native", "avx512_bf16"))),
    ],
)
def test_native_on_the_forced_instruction_set(name: str, isa: str) -> None:
    obstacles = {each: obstacle for each, obstacle, _ in cpu.load().module.isas()}
    if isa and obstacles.get(isa):
        printed, logged = run(name, isa=isa)
        if name == "native":
            assert (
                printed == f"kernels = native: native CPU kernels are not available: "
                f"PAGEWIRE_CPU_ISA={isa}: {obstacles[isa]}"
            )
        else:
            assert printed.startswith("bfloat16/torch/")
            assert logged.count("WARNING running on the slower torch kernels") == 1
        return
    best = next(each for each, obstacle, emulated in cpu.load().module.isas() if not obstacle and not emulated)
    # torch's own pool would compete with the native one for the cores: it gets one thread
    assert run(name, isa=isa) == (f"bfloat16/native/{isa or best}/tp1 1", "")


def test_torch_can_be_forced_without_a_warning() -> None:
    printed, logged = run("auto", isa="torch")
    assert printed.startswith("bfloat16/torch/")
    assert printed.endswith("/tp1 2")
    assert logged == ""


def test_without_the_extension_auto_warns_once_and_native_refuses() -> None:
    printed, logged = run("auto", "native", isa="", hidden=True)
    found, refusal = printed.splitlines()
    assert found.startswith("bfloat16/torch/")
    assert logged.count("\n") == 0
    assert logged.startswith(
        "WARNING running on the slower torch kernels: the package pagewire-kernels-cpu is not installed"
    )
    assert refusal.startswith("kernels = native: native CPU kernels are not available: the package")


def test_an_unknown_name() -> None:
    with pytest.raises(
        ModelError, match="kernels 'fast' is not known; known are auto, native, torch, reference, triton"
    ):
        load_kernel_set("fast")

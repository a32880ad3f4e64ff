"""Which kernels are found: forced, absent, outdated; in processes of their own, since the choice is made once."""

import os
import subprocess
import sys

import pytest

import kernels.cpu
from kernels.cpu.extension import Extension, Unavailable, find_extension
from tests.kernels.cpu.harness import ISAS, kernels_for


def run(code: str, **environ: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() + result.stderr.strip()


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_can_be_forced(isa: str) -> None:
    kernels_for(isa)
    assert run("import kernels.cpu as c; print(c.load().isa)", PAGEWIRE_CPU_ISA=isa) == isa


def test_the_best_is_picked_and_never_the_emulated() -> None:
    kernels_for("avx2")
    module = kernels.cpu.load().module
    best = next(name for name, obstacle, emulated in module.isas() if not obstacle and not emulated)
    assert run("import kernels.cpu as c; print(c.load().isa)", PAGEWIRE_CPU_ISA="") == best


def test_what_cannot_run_is_said_and_not_tried() -> None:
    kernels_for("avx2")
    module = kernels.cpu.load().module
    for name, obstacle, _ in module.isas():
        if obstacle:
            with pytest.raises(RuntimeError, match=name):
                module.use(name)
            found = find_extension(name)
            assert isinstance(found, Unavailable)
            assert obstacle in found.reason
    unknown = find_extension("avx1024")
    assert isinstance(unknown, Unavailable)
    assert "avx1024 is not known; known are amx" in unknown.reason


def test_torch_is_a_choice_without_a_warning() -> None:
    out = run(
        "import kernels.cpu as c; c.warn_if_unavailable(); print(c.available(), c.why_unavailable())",
        PAGEWIRE_CPU_ISA="torch",
    )
    assert out == "False PAGEWIRE_CPU_ISA is torch"


def test_without_the_extension_there_is_one_warning_and_a_reason() -> None:
    code = (
        "import sys; sys.modules['pagewire_kernels_cpu'] = None\n"
        "import kernels.cpu as c\n"
        "for _ in range(3): c.warn_if_unavailable()\n"
        "assert not c.available()\n"
        "try: c.load()\n"
        "except ImportError as e: print(e)"
    )
    out = run(code, PAGEWIRE_CPU_ISA="")
    assert "native CPU kernels are not available: the package pagewire-kernels-cpu is not installed" in out
    assert out.count("running on the slower torch kernels") == 1


def test_an_outdated_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_for("avx2")
    monkeypatch.setattr(kernels.cpu.load().module, "ABI", 0)
    found = find_extension("")
    assert isinstance(found, Unavailable)
    assert "interface 0" in found.reason


def test_found_again_it_is_the_same() -> None:
    kernels_for("avx2")
    assert isinstance(find_extension(kernels.cpu.load().isa), Extension)

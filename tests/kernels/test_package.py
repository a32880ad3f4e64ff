"""The package name `kernels` is Hugging Face's too: transformers must ignore ours, and we must notice theirs."""

import subprocess
import sys
from types import ModuleType

import pytest
from packaging.version import Version
from transformers.utils.import_utils import is_kernels_available

import kernels
from engine.kernels_package import WrongKernelsPackage, check_kernels_package


def test_transformers_does_not_take_ours_for_hugging_faces() -> None:
    assert not is_kernels_available()


def test_the_version_stays_below_hugging_faces_minimum() -> None:
    assert Version(kernels.__version__) < Version("0.9")


def test_importing_the_package_is_light() -> None:
    code = "import kernels, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_wrong_package_is_named_with_what_to_do() -> None:
    check_kernels_package(kernels)
    theirs = ModuleType("kernels")
    theirs.__file__, theirs.__version__ = "/site-packages/kernels/__init__.py", "0.11.0"  # type: ignore[attr-defined]
    with pytest.raises(
        WrongKernelsPackage, match=r"/site-packages/kernels/__init__.py.*0\.11\.0.*pip uninstall kernels"
    ):
        check_kernels_package(theirs)

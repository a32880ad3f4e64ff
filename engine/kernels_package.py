"""Makes sure that `kernels` is pagewire's: importing this module checks it, before anything of it is used.

Hugging Face publishes a package of that name. Installed into the same environment it may shadow ours, and the first
error would be a puzzling ModuleNotFoundError for one of our files.
"""

import importlib
from types import ModuleType


class WrongKernelsPackage(ImportError):
    """Another distribution's `kernels` is imported instead of ours."""


def check_kernels_package(package: ModuleType) -> None:
    """Raise WrongKernelsPackage unless `package` is pagewire's own."""
    if getattr(package, "DISTRIBUTION", None) != "pagewire":
        raise WrongKernelsPackage(
            f"pagewire needs its own package `kernels`, but {getattr(package, '__file__', 'another')} was imported "
            f"(version {getattr(package, '__version__', 'unknown')}). Remove it (`pip uninstall kernels`) and "
            "reinstall pagewire, or give pagewire a virtual environment of its own."
        )


check_kernels_package(importlib.import_module("kernels"))

"""What a result must say about the machine it was measured on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name, with family and model: a name may stand for several generations."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.processor()
    return f"{found['model name']} (family {found['cpu family']}, model {found['model']})"


def describe() -> dict[str, str]:
    """Columns for a CSV: CPU, number of CPUs, Python, and the load before anything was measured."""
    return {
        "hardware": processor(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }

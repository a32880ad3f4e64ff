"""What a result must say about the machine it was measured on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def describe() -> dict[str, str]:
    """Columns for a CSV: CPU, number of CPUs, Python, and the load before anything was measured."""
    return {
        "hardware": processor(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }

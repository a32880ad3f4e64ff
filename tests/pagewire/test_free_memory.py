"""Memory that was freed in small pieces goes back to the system."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os
from pathlib import Path
from pagewire.free_memory import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytearray(4000) for _ in range(25_000)]
last = pieces[-1]  # it holds the end of the heap, which is all that glibc shortens by itself
del pieces
before = resident()
release_free_memory()
print((before - resident()) // 1_000_000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_freed_pieces_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 80

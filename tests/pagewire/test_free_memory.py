"""Memory that was freed goes back to the system, or stays for who wants as much again."""

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


NUM_FAULTS = """
import resource

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        pieces = [b"x" * (1 << 20) for _ in range(60)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""

KEEPING = f"""{NUM_FAULTS}
from pagewire.free_memory import keep_free_memory

before = num_faults()
keep_free_memory()
num_faults()
print(before, num_faults())
"""

WORKER = f"""{NUM_FAULTS}
import importlib, sys
from types import SimpleNamespace

def serve(coroutine):
    coroutine.close()
    num_faults()
    print(num_faults())

main = importlib.import_module(sys.argv[1])
main.check_before_loading = lambda config: None
main.load_engine = lambda options: SimpleNamespace(close=lambda: None)
main.event_loop.run = serve
options = SimpleNamespace(speculative_config=None, model_copy=lambda update: None)
main.run(SimpleNamespace(engine=options))
"""

only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")


@only_glibc
def test_freed_pieces_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 80


@only_glibc
def test_large_pieces_stay_for_the_next_ones() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after * 20 < before


@only_glibc
@pytest.mark.parametrize("service", ["prefill_svc", "decode_svc"])
def test_workers_keep_them_while_they_serve(service: str) -> None:
    """Messages' pieces are freed and wanted again all the time; without a word to glibc that is 60 000 faults here."""
    done = subprocess.run([sys.executable, "-c", WORKER, f"{service}.main"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100

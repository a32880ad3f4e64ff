"""Spreads the independent GEMMs of an op over threads; each GEMM runs on one thread.

Why not torch's own threads: at 16 rows a GEMM gains little from a second thread (Gemma-3-270M's in bfloat16: 1.26 ms
per layer on one, 1.1 ms on two), one fork and join per GEMM stalls whenever another process holds a core, and how a
library cuts one GEMM among threads is its own affair, while a result here can't depend on the number of threads.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

Body = Callable[[int, int], None]
"""Does the pieces begin <= i < end."""


class TilePool:
    """`threads` threads, the caller's included; the others exist once they are needed and end with the pool."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = (
            ThreadPoolExecutor(threads - 1, "pagewire-tiles", initializer=torch.set_num_threads, initargs=(1,))
            if threads > 1
            else None
        )

    def run(self, num_pieces: int, body: Body, *, spread: bool = True) -> None:
        """Do all pieces; `spread` False keeps them on this thread (a hand-over costs about 50 us)."""
        with single_threaded():
            shares = min(self.threads, num_pieces) if spread else 1
            if self._others is None or shares < 2:
                body(0, num_pieces)
                return
            bounds = [num_pieces * share // shares for share in range(shares + 1)]
            futures = [self._others.submit(_infer, body, bounds[i], bounds[i + 1]) for i in range(1, shares)]
            try:
                body(0, bounds[1])
            finally:
                wait(futures)
            for future in futures:
                future.result()


def _infer(body: Body, begin: int, end: int) -> None:
    """Inference mode is per thread, and its tensors may be written in it only."""
    with torch.inference_mode():
        body(begin, end)


@contextmanager
def single_threaded() -> Iterator[None]:
    """This thread's torch calls (and MKL's on all threads) use one thread; setting it costs 0.2 us."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

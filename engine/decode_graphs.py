"""Decode steps in a few sizes, each a CUDA graph: a replay is one launch where the step has hundreds.

A step of n sequences runs the graph of the next bucket; rows behind the n are padding (`engine/decode_step.py`). The
graphs share one pool of memory, since only one of them runs at a time; the largest is captured first, the others fit
into what it took. Row invariance makes the bucket invisible: a row has the same bits in each.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.decode_step import DecodeStep
from engine.models.decoder import Decoder

Step = Callable[[], Tensor]
Capture = Callable[[Step], Step]
"""Makes of a step what does the same again, into the same tensor, with whatever its buffers have by then."""

GRAPH_BYTES = 16 << 20
"""For the launches of one graph, in the driver's memory: hundreds of kernels of a model of 32 layers."""

logger = logging.getLogger(__name__)


class DecodeSteps(Protocol):
    """Runs `DecodeStep`s."""

    def run(self, num_rows: int, max_kv_len: int) -> Tensor:
        """Logits [num_rows, V]; they stay until the next call."""
        ...


class EagerSteps:
    """Each step as large as it is, launch by launch (`--enforce-eager`)."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def run(self, num_rows: int, max_kv_len: int) -> Tensor:
        """See `DecodeSteps`."""
        return self._step.run(num_rows, max_kv_len)


class DecodeGraphs:
    """A captured step for each bucket; sequences longer than `longest` tokens run eager."""

    def __init__(self, step: DecodeStep, capture: Capture, *, longest: int) -> None:
        """Captures them all, which takes seconds, and the first time the kernels' compilation."""
        self._step = step
        self._longest = longest
        self._graphs: dict[int, Step] = {}
        sizes = buckets(step.max_rows)
        began = time.monotonic()
        for size in reversed(sizes):
            self._graphs[size] = capture(lambda size=size: step.run(size, longest))  # type: ignore[misc]
            logger.info("captured a decode step of %d sequences (%d of %d)", size, len(self._graphs), len(sizes))
        logger.info("captured decode steps of %s sequences in %.1f s", sizes, time.monotonic() - began)

    def run(self, num_rows: int, max_kv_len: int) -> Tensor:
        """See `DecodeSteps`."""
        if max_kv_len > self._longest:
            return self._step.run(num_rows, max_kv_len)
        size = next(size for size in buckets(self._step.max_rows) if size >= num_rows)
        return self._graphs[size]()[:num_rows]


class CudaCapture:
    """Captures on the current device; all graphs of one object share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Runs the step once, for what is compiled or set up by a first run, then records it."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def captures_steps(model: Decoder, *, enforce_eager: bool) -> bool:
    """Whether its decode steps can be graphs and are to be; experts' rows and ranks' sums come from the host."""
    return not enforce_eager and model.config.moe is None and model.config.shard is None


def graph_bytes(activations: int, max_rows: int, vocab_size: int) -> int:
    """About what `DecodeGraphs` will take of a GPU's memory: they share what the largest step holds at once.

    But the logits of each stay, float32 [rows, V].
    """
    *smaller, _ = sizes = buckets(max_rows)
    return activations + 4 * vocab_size * sum(smaller) + GRAPH_BYTES * len(sizes)


def replayed_eagerly(step: Step) -> Step:
    """What stands in for a capture on CPU tensors: the padded step itself, over the same buffers."""
    return step


def buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, … and `max_rows`."""
    return [1 << i for i in range((max_rows - 1).bit_length())] + [max_rows]

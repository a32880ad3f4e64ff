"""Host memory to the device and back in one copy each, which nobody waits for.

A copy out of pageable memory makes the host wait until everything queued before it is done. Out of pinned memory it is
one more thing in the queue; torch's cache of pinned memory gives a piece out again only when its copy is done. On CPU
tensors the same code makes plain copies, so that tests see what a device would.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Of every array's first byte: triton compiles another kernel for pointers that are not so."""

_DTYPES: Mapping[str, torch.dtype] = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "float64": torch.float64,
}

Array = NDArray[np.generic]


class ByteLayout:
    """Arrays of fixed shapes and dtypes side by side in one buffer, in the order of `like`."""

    def __init__(self, like: Sequence[Array]) -> None:
        self._spans: list[tuple[int, int]] = []
        self._views = [(_DTYPES[array.dtype.name], array.shape) for array in like]
        self.num_bytes = 0
        for array in like:
            self._spans.append((self.num_bytes, self.num_bytes + array.nbytes))
            self.num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, arrays: Sequence[Array], device: torch.device) -> Tensor:
        """uint8 [num_bytes] on the host, pinned for a device that is none."""
        packed = np.zeros(self.num_bytes, dtype=np.uint8)
        for (start, end), array in zip(self._spans, arrays, strict=True):
            packed[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host = torch.from_numpy(packed)
        return host if device.type == "cpu" else host.pin_memory()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays in a buffer uint8 [num_bytes]."""
        return [
            buffer[start:end].view(dtype).view(shape)
            for (start, end), (dtype, shape) in zip(self._spans, self._views, strict=True)
        ]


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Copies of them on the device, all in one transfer."""
    layout = ByteLayout(arrays)
    return layout.views(layout.pack(arrays, device).to(device, non_blocking=True))


class HostCopy:
    """Tensors of the device on their way to the host; they may change there meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            self._copies = [tensor.clone() for tensor in tensors]
            return
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def lists(self) -> list[list[int]]:
        """What each tensor had, as nested lists. Waits for the copy, for nothing that was queued after it."""
        if self._done is not None:
            self._done.synchronize()
        return [copy.tolist() for copy in self._copies]

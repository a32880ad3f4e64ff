"""A CUDA graph's stand-in on CPU tensors, and a guard that sees what would make the host wait.

`record` keeps every torch op and kernel launch of a step with the tensors it had. A replay does them again on the same
tensors, without the Python that made them: a number that came from the host stays what it was, as in a CUDA graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

WAITING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount")


class Ops(TorchDispatchMode):
    """Every torch op but those with which the interpreter itself runs a kernel. Raises for ops that wait."""

    def __init__(self, *, is_recorded: bool) -> None:
        super().__init__()
        self.is_recorded = is_recorded
        self.replays: list[Callable[[], None]] = []
        self.is_paused = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        name = op.overloadpacket.__name__
        if name in WAITING_OPS or (name.startswith("index") and _has_mask(args)):
            raise AssertionError(f"{op} makes the host wait for the device")
        if self.is_recorded and name == "lift_fresh" and args[0].dim():
            raise AssertionError("a tensor made of host data: a graph would keep what it had when it was captured")
        inputs = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor)]
        if not isinstance(result, Tensor) or any(_storage(result) == _storage(each) for each in inputs):
            if op._schema.is_mutable:
                self.replays.append(lambda: op(*args, **(kwargs or {})))
        elif name != "empty":
            self.replays.append(lambda: result.copy_(op(*args, **(kwargs or {}))))
        return result


def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """As `engine.decode_graphs.CudaCapture`."""
    step()  # as there: what a first run sets up is not recorded
    with launches_seen(is_recorded=True) as ops, ops:
        result = step()

    def replay() -> Tensor:
        with torch.inference_mode():
            for again in ops.replays:
                again()
        return result

    return replay


@contextmanager
def launches_seen(*, is_recorded: bool = False) -> Iterator[Ops]:
    """Kernel launches are among the ops."""
    ops, launch = Ops(is_recorded=is_recorded), GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        ops.is_paused = True
        launch(self, *args, **kwargs)
        ops.is_paused = False
        ops.replays.append(lambda: launch(self, *args, **kwargs))

    GridExecutor.__call__ = call
    try:
        yield ops
    finally:
        GridExecutor.__call__ = launch


@contextmanager
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Raises for whatever would wait for a device; lists what is allowed, copies to the host that a step ends with."""
    fetched: list[str] = []
    to, tolist, tensor = Tensor.to, Tensor.tolist, torch.tensor
    with launches_seen() as ops, monkeypatch.context() as patched:

        def checked_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            moves = "device" in kwargs or any(isinstance(each, torch.device | str) for each in args)
            if moves and not kwargs.get("non_blocking") and not ops.is_paused:
                raise AssertionError("a copy to the device out of pageable memory waits for it")
            return to(self, *args, **kwargs)

        def checked_tensor(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") is not None and not ops.is_paused:
                raise AssertionError("a tensor made on the device out of host data waits for it")
            return tensor(*args, **kwargs)

        def counted(self: Tensor) -> Any:
            if not ops.is_paused:
                fetched.append(str(tuple(self.shape)))
            return tolist(self)

        def refused(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not ops.is_paused:
                raise AssertionError("a copy to the host waits for the device")
            return to(self, "cpu")

        patched.setattr(Tensor, "to", checked_to)
        patched.setattr(Tensor, "tolist", counted)
        patched.setattr(Tensor, "cpu", refused)
        patched.setattr(torch, "tensor", checked_tensor)
        with ops:
            yield fetched


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = values.values()
    for each in values or ():
        if isinstance(each, list | tuple | dict):
            yield from _flat(each)
        else:
            yield each


def _has_mask(args: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in _flat(args[1:]))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

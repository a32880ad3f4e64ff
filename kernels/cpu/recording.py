"""Records the ops of a step, to run them again in one native call (src/program.h): for a CPU what CUDA graphs are.

    record    the step's Python runs once, with room for `max_rows`: native ops are noted instead of run, and every new
              tensor comes from an arena, whose buffers are used again as soon as nothing refers to them
    run       the noted ops with the inputs of another step, of as many rows as that has

Only native ops, new tensors and views of tensors may occur. Whatever else torch is asked to do would compute something
while nothing is there yet, and would be missing from the record: a step with it is refused (`Unrecordable`).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_LINE_BYTES = 64


class Unrecordable(Exception):
    """A step that can't be run again from a record; says why."""


class Arena:
    """Memory of tensors that are needed at different times, as long as this lives. What nobody writes to takes none."""

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []
        self._free: list[NDArray[np.uint8]] = []
        self._leases: dict[int, weakref.ref[Any]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._buffers))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous tensor; its place is free again when the last view of it is gone."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        fitting = [i for i, each in enumerate(self._free) if num_bytes <= len(each)]
        smallest = min(fitting, key=lambda i: len(self._free[i]), default=None)
        buffer = self._new(num_bytes) if smallest is None else self._free.pop(smallest)
        lease = buffer[:num_bytes]  # an array of its own, which torch holds as long as there is a view
        number = id(lease)
        self._leases[number] = weakref.ref(lease, lambda _: self._give_back(number, buffer))
        return torch.from_numpy(lease).view(dtype).view(tuple(shape))

    def seal(self) -> None:
        """No tensor follows: those that are there keep their places."""
        self._leases.clear()

    def _new(self, num_bytes: int) -> NDArray[np.uint8]:
        """Begins at a cache line."""
        memory = np.empty(num_bytes + _LINE_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % _LINE_BYTES
        self._buffers.append(memory[start : start + num_bytes])
        return self._buffers[-1]

    def _give_back(self, number: int, buffer: NDArray[np.uint8]) -> None:
        self._leases.pop(number, None)
        self._free.append(buffer)


class RecordedStep:
    """A step's ops. The weights and the KV memory must be there whenever it runs; whoever has it sees to that."""

    def __init__(self, program: Any, arena: Arena, result: Tensor, max_rows: int) -> None:
        self._program = program
        self._arena = arena
        self._result = result
        self.max_rows = max_rows

    @property
    def num_ops(self) -> int:
        return len(self._program)

    @property
    def num_bytes(self) -> int:
        """Of the intermediates of `max_rows` rows."""
        return self._arena.num_bytes

    def run(self, num_rows: int, num_sequences: int, inputs: Sequence[Tensor]) -> Tensor:
        """The step with these inputs, in the order in which they were recorded. -> [num_rows, ...].

        Raises what the ops raise.
        """
        self._program.run(
            *(num_rows, num_sequences),
            *([each.data_ptr() for each in inputs], [each.stride(0) for each in inputs]),
        )
        return self._result[:num_rows].clone()


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make tensors, in the arena, and views of them; nothing else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first call imports torch's compiler and sympy: 115 MB and 2 s for what is never compiled."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.empty_like.default and args[0].is_contiguous():
            return self._arena.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable or func is torch.ops.aten.lift_fresh.default:  # a tensor of constants would be gone
            raise Unrecordable(f"torch computes something: {func}")
        results = func(*args, **kwargs)
        own = {_storage(each) for each in args if isinstance(each, Tensor)}
        every = results if isinstance(results, (list, tuple)) else (results,)
        if not all(isinstance(each, Tensor) and _storage(each) in own for each in every):
            raise Unrecordable(f"torch computes something: {func}")
        return results


class _Unread(TorchFunctionMode):
    """Refuses what hands a tensor's values out without torch computing anything, so that `_Refusing` isn't asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise Unrecordable(f"values are read: {func.__name__}")
        return func(*args, **(kwargs or {}))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def record(ops: Any, max_rows: int, inputs: Sequence[Tensor], run: Callable[[], Tensor]) -> RecordedStep:
    """Records what `run` does with `inputs`, which have `max_rows` rows, or sequences. Raises Unrecordable.

    An input is read by its first dimension's stride where it is a block table; its values mean nothing.
    """
    arena = Arena()
    program = ops.Program(max_rows, [each.data_ptr() for each in inputs])
    try:
        with _Refusing(arena), _Unread():
            try:
                program.begin()
                result = run()
            finally:
                program.end()
    except ops.Unrecordable as error:
        raise Unrecordable(str(error)) from None
    finally:
        arena.seal()
    if len(result) != max_rows or not result.is_contiguous():
        raise Unrecordable("the result is not one row for each of the step's")
    return RecordedStep(program, arena, result, max_rows)

"""One quantized matrix of a checkpoint: its tensors by suffix, checked against what the format says they are."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kernels.grouped import GroupedMatrix

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32,)


class StoredFormat(Protocol):
    """How a checkpoint stores its quantized matrices. Frozen; equal ones give equal weights of equal tensors."""

    @property
    def label(self) -> str:
        """Everything that changes what the tensors stand for: in block keys, the numerics class and cache files."""
        ...

    @property
    def marker(self) -> str:
        """The suffix of a tensor that every quantized matrix has and no other one."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Those of all tensors that a quantized matrix may have."""
        ...

    def read(self, matrix: "StoredMatrix", rows: int, columns: int) -> GroupedMatrix:
        """The matrix W [rows, columns]. Raises ValueError naming the tensor and what is wrong with it."""
        ...


class StoredMatrix:
    """The tensors of one matrix, by suffix. Errors name the suffix; whoever reads says whose it is."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, suffix: str) -> bool:
        return suffix in self._tensors

    def take(self, suffix: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The tensor. Raises ValueError when it is missing, or of another shape or type."""
        tensor = self._tensors.get(suffix)
        if tensor is None:
            raise ValueError(f"tensor {suffix} {list(shape)} is missing")
        if tuple(tensor.shape) != shape:
            raise self.error(suffix, f"is {list(tensor.shape)}; config and quantization_config ask for {list(shape)}")
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(suffix, f"is {str(tensor.dtype).removeprefix('torch.')}; it must be {names}")
        return tensor

    def shape_among(self, suffix: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """The tensor's shape if it is one of these, else the first of them, for `take` to say what is wrong."""
        tensor = self._tensors.get(suffix)
        shape = shapes[0] if tensor is None else tuple(tensor.shape)
        return shape if shape in shapes else shapes[0]

    def error(self, suffix: str, problem: str) -> ValueError:
        """What is wrong with one tensor."""
        return ValueError(f"tensor {suffix} {problem}")


def num_groups(columns: int, group_size: int) -> int:
    """Groups of a row; a size of -1 is the whole row."""
    return 1 if group_size == -1 else -(-columns // group_size)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [...] -> int16 [..., 32 / bits]: the codes in each number, from the lowest bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.int16)


def zero_offsets(scales: Tensor, zeros: Tensor, bits: int) -> Tensor | None:
    """What -zero · scale leaves of (code - zero) · scale when codes count from the middle; None if nothing."""
    shifted = (1 << (bits - 1)) - zeros.float()
    return shifted * scales if bool(shifted.any()) else None


def column_order(matrix: StoredMatrix, suffix: str, columns: int, group_size: int) -> Tensor | None:
    """The columns sorted by their group, from the group of each (int32 [columns]); None if they lie so already.

    Raises ValueError for a group that isn't there, or whose columns aren't `group_size`.
    """
    groups = matrix.take(suffix, (columns,), INTEGERS).long()
    count, size = num_groups(columns, group_size), columns if group_size == -1 else group_size
    if not 0 <= int(groups.min()) <= int(groups.max()) < count:
        wrong = groups[(groups < 0) | (groups >= count)]
        raise matrix.error(suffix, f"has group {int(wrong[0])}; there are groups 0 to {count - 1}")
    plain = torch.arange(columns) // size
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], plain):
        sizes = torch.bincount(groups, minlength=count)
        group = int((sizes != torch.bincount(plain, minlength=count)).nonzero()[0])
        raise matrix.error(suffix, f"has {int(sizes[group])} columns of group {group}; group_size is {size}")
    return None if torch.equal(groups, plain) else order

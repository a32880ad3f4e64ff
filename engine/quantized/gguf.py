"""GGUF's blocks of numbers as a file has them: llama.cpp's types with scales for 32 numbers, and its K types.

blocks      uint8 [N, bytes of a row]
type        uint8 [2]: GGUF's number of the type, and 8 if its numbers are to be int8, as others over that input are
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quantized.stored import StoredMatrix
from kernels.grouped import SUPER_BLOCK, GroupedMatrix, KScales

GROUP = 32


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF type: numbers of a block, its bytes, and how blocks uint8 [N, blocks, bytes] are read."""

    name: str
    numbers: int
    bytes: int
    read: Callable[[Tensor], GroupedMatrix]


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Matrices may differ in type."""

    marker = "blocks"
    suffixes = ("blocks", "type")

    @property
    def label(self) -> str:
        return "gguf"

    def read(self, matrix: StoredMatrix, rows: int, columns: int) -> GroupedMatrix:
        """Raises ValueError."""
        number, width = matrix.take("type", (2,), (torch.uint8,)).tolist()
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(f"{each} ({type_.name})" for each, type_ in TYPES.items())
            raise matrix.error("type", f"is {number}; known are {known}")
        blocks = matrix.take("blocks", (rows, columns // kind.numbers * kind.bytes), (torch.uint8,))
        read = kind.read(blocks.view(rows, -1, kind.bytes))
        if width != 8:
            return read
        return GroupedMatrix("int8", read.numbers, read.scales, GROUP)


def _q4_0(blocks: Tensor) -> GroupedMatrix:
    """float16 scale; 16 bytes whose lower halves are the first 16 codes."""
    return _halves("int4", blocks, _split(blocks[..., 2:]).char() - 8)


def _q5_0(blocks: Tensor) -> GroupedMatrix:
    """float16 scale; the fifth bits, 4 bytes; 16 bytes as Q4_0's."""
    fifth = (blocks[..., 2:6].repeat_interleave(8, dim=2) >> torch.arange(8, dtype=torch.uint8).repeat(4)) & 1
    return _halves("int5", blocks, (_split(blocks[..., 6:]) | fifth << 4).char() - 16)


def _q8_0(blocks: Tensor) -> GroupedMatrix:
    """float16 scale; 32 int8."""
    return _halves("int8", blocks, blocks[..., 2:].contiguous().view(torch.int8))


def _q4_k(blocks: Tensor) -> GroupedMatrix:
    """float16 scale and min; 12 bytes of scales and mins; 4 times 32 bytes, the lower halves first."""
    codes = _split(_grid(blocks[..., 16:], 4, 32)).flatten(1)
    return GroupedMatrix.of_levels("uint4", codes.char(), _k_scales(blocks))


def _q5_k(blocks: Tensor) -> GroupedMatrix:
    """The same with 32 bytes of fifth bits before the codes, bit i for the i-th 32 numbers."""
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _grid(_split(_grid(blocks[..., 48:], 4, 32)), 2, 32).flatten(2, 3) | fifth << 4
    return GroupedMatrix.of_levels("uint5", codes.flatten(1).char(), _k_scales(blocks))


def _q6_k(blocks: Tensor) -> GroupedMatrix:
    """For each 128 numbers 64 bytes of low and 32 of high bits, all low ones first; 16 int8 scales; float16 scale."""
    low = _grid(_split(_grid(blocks[..., :128], 2, 64)), 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (_grid(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    scales = blocks[..., 192:208].flatten(1).contiguous().view(torch.int8)
    levels = KScales(_float16(blocks, 208), scales)
    return GroupedMatrix.of_levels("int6", (low | high << 4).flatten(1).char() - 32, levels)


TYPES = {
    2: BlockType("Q4_0", GROUP, 18, _q4_0),
    6: BlockType("Q5_0", GROUP, 22, _q5_0),
    8: BlockType("Q8_0", GROUP, 34, _q8_0),
    12: BlockType("Q4_K", SUPER_BLOCK, 144, _q4_k),
    13: BlockType("Q5_K", SUPER_BLOCK, 176, _q5_k),
    14: BlockType("Q6_K", SUPER_BLOCK, 210, _q6_k),
}
"""By GGUF's number."""


def _grid(values: Tensor, *sizes: int) -> Tensor:
    """The last dimension in so many."""
    return values.reshape(*values.shape[:-1], *sizes)


def _split(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]: the lower halves, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _float16(blocks: Tensor, place: int) -> Tensor:
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0]


def _halves(kind: str, blocks: Tensor, numbers: Tensor) -> GroupedMatrix:
    return GroupedMatrix(kind, numbers.flatten(1), _float16(blocks, 0).float(), GROUP)  # type: ignore[arg-type]


def _k_scales(blocks: Tensor) -> KScales:
    """Of 8 scales and mins the first four have 6 bits of a byte, the others 4 bits, and their upper two up there."""
    first, second, third = (blocks[..., 4 + i : 8 + i] for i in (0, 4, 8))
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=2)
    mins = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=2)
    return KScales(_float16(blocks, 0), scales.flatten(1), _float16(blocks, 2), mins.flatten(1))

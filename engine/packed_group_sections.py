"""A weight that the checkpoint has quantized, in the sections of a file of packed weights (packed_weights.py).

NAME            the numbers
NAME form       int64: kind of numbers, columns of a group, form of the scales (kernels/cpu/packed_scales.py)
NAME scales, NAME offsets, NAME order, NAME bias    as in `PackedGroups`; the last three where there are any

NAME parts      int64: rows of each part of a weight that has several; part i is there as "NAME part i"
"""

import torch
from torch import Tensor

from engine.section_file import SectionFile, SectionFileError, SectionWriter
from engine.weight_source import Projection
from kernels.cpu.packed_groups import NUMBERS, PackedGroups, packed_sizes
from kernels.cpu.packed_parts import PackedParts
from kernels.cpu.packed_scales import is_form, scales_from_bytes


def write_groups(writer: SectionWriter, name: str, weight: PackedGroups | PackedParts) -> None:
    """Raises OSError."""
    if isinstance(weight, PackedParts):
        rows = torch.tensor([part.num_out for part in weight.parts])
        with writer.section(f"{name} parts", rows.nbytes) as data:
            data.copy_(rows.view(torch.uint8))
        for number, part in enumerate(weight.parts):
            write_groups(writer, f"{name} part {number}", part)
        return
    form = torch.tensor([NUMBERS[weight.kind], weight.group_size, weight.scale_form])
    parts = {"": weight.data, " form": form, " scales": weight.scales, " offsets": weight.offsets}
    for kind, tensor in (parts | {" order": weight.order, " bias": weight.bias}).items():
        if tensor is not None:
            with writer.section(name + kind, tensor.nbytes) as data:
                data.copy_(tensor.view(torch.uint8))


def read_groups(file: SectionFile, name: str, projection: Projection, dtype: torch.dtype) -> PackedGroups | PackedParts:
    """The weight that was written for this projection. Raises SectionFileError."""
    num_outs = _rows_of_parts(file, name, projection)
    if len(num_outs) == 1:
        return _read_part(file, name, projection, projection.num_out, dtype)
    names = (f"{name} part {number}" for number in range(len(num_outs)))
    parts = zip(names, num_outs, strict=True)
    return PackedParts(tuple(_read_part(file, part, projection, num_out, dtype) for part, num_out in parts))


def _rows_of_parts(file: SectionFile, name: str, projection: Projection) -> list[int]:
    """Of each part: some neighbours among the projection's matrices."""
    for count in range(2, len(projection.num_outs) + 1):
        if f"{name} part {count - 1}" in file and f"{name} part {count}" not in file:
            rows: list[int] = file.tensor(f"{name} parts", 8 * count).view(torch.int64).tolist()
            if sum(rows) != projection.num_out or min(rows) <= 0:
                raise SectionFileError(f"section {name} parts has {rows} rows; they are {projection.num_out} in all")
            return rows
    return [projection.num_out]


def _read_part(file: SectionFile, name: str, projection: Projection, num_out: int, dtype: torch.dtype) -> PackedGroups:
    number, group_size, scale_form = file.tensor(f"{name} form", 24).view(torch.int64).tolist()
    kind = next((each for each, code in NUMBERS.items() if code == number), None)
    if kind is None or group_size <= 0 or not is_form(scale_form):
        raise SectionFileError(f"section {name} form has numbers {number} in groups of {group_size}, {scale_form}")
    num_in, gated = projection.num_in, projection.gated
    sizes = packed_sizes(kind, num_out, num_in, group_size, scale_form, gated=gated)

    def part(suffix: str, size: int, of: torch.dtype = torch.float32) -> Tensor | None:
        section = f"{name} {suffix}"
        return file.tensor(section, size).view(of) if section in file else None

    return PackedGroups(
        file.tensor(name, sizes.data), num_out, num_in, dtype, kind, group_size,
        scales=scales_from_bytes(scale_form, file.tensor(f"{name} scales", sizes.scales)),
        offsets=part("offsets", sizes.offsets), order=part("order", sizes.order, torch.int64),
        gated=gated, bias=part("bias", sizes.bias),
    )  # fmt: skip

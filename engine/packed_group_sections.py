"""A weight that the checkpoint has quantized, in the sections of a file of packed weights (packed_weights.py).

NAME            the numbers
NAME form       int64: kind of numbers, columns of a group, form of the scales (kernels/cpu/packed_scales.py)
NAME scales, NAME offsets, NAME order, NAME bias    as in `PackedGroups`; the last three where there are any
"""

import torch
from torch import Tensor

from engine.section_file import SectionFile, SectionFileError, SectionWriter
from engine.weight_source import Projection
from kernels.cpu.packed_groups import NUMBERS, PackedGroups, packed_sizes
from kernels.cpu.packed_scales import is_form, scales_from_bytes


def write_groups(writer: SectionWriter, name: str, weight: PackedGroups) -> None:
    """Raises OSError."""
    form = torch.tensor([NUMBERS[weight.kind], weight.group_size, weight.scale_form])
    parts = {"": weight.data, " form": form, " scales": weight.scales, " offsets": weight.offsets}
    for kind, tensor in (parts | {" order": weight.order, " bias": weight.bias}).items():
        if tensor is not None:
            with writer.section(name + kind, tensor.nbytes) as data:
                data.copy_(tensor.view(torch.uint8))


def read_groups(file: SectionFile, name: str, projection: Projection, dtype: torch.dtype) -> PackedGroups:
    """The weight that was written for this projection. Raises SectionFileError."""
    number, group_size, scale_form = file.tensor(f"{name} form", 24).view(torch.int64).tolist()
    kind = next((each for each, code in NUMBERS.items() if code == number), None)
    if kind is None or group_size <= 0 or not is_form(scale_form):
        raise SectionFileError(f"section {name} form has numbers {number} in groups of {group_size}, {scale_form}")
    num_out, num_in, gated = projection.num_out, projection.num_in, projection.gated
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

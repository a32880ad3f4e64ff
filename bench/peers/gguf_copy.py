"""A GGUF file's model again with all its matrices in one other type, which `gguf` can quantize to."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize, quantize

FILE_TYPES = {
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.Q5_0: LlamaFileType.MOSTLY_Q5_0,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def gguf_copy(src: Path, out: Path, kind: GGMLQuantizationType) -> Path:
    """Writes `out`, unless it is there and newer than `src`; returns it. Matrices lose what `kind` makes them lose."""
    if out.exists() and out.stat().st_mtime_ns > src.stat().st_mtime_ns:
        return out
    reader = GGUFReader(src)
    partial = out.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        value: Any = field.contents()
        of_items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of_items)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, tensor.tensor_type), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)
    return out

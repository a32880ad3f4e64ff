"""Converts a GGUF file into a model directory: safetensors, config.json, generation_config.json, tokenizer.json."""

from pathlib import Path

from engine.atomic_dir import atomic_directory
from engine.conversion import ConvertError, Progress
from engine.gguf_cache import cached_directory
from engine.gguf_config import hf_config
from engine.gguf_description import write_description
from engine.gguf_reader import GgufFile
from engine.gguf_weights import SAFETENSORS_TYPES, packed_kinds, write_safetensors
from engine.quantized.gguf import GROUP

__all__ = ["ConvertError", "Progress", "convert_gguf", "packed_directory"]


def convert_gguf(src: Path, out: Path, *, dtype: str = "bfloat16", progress: Progress | None = None) -> Path:
    """Writes the model in `src` to the new directory `out` and returns it.

    Quantized weights are expanded to `dtype` ("bfloat16" or "float32"), one tensor at a time. `out` appears complete
    or not at all. Raises ConvertError for anything that can't be converted, or if `out` exists.
    """
    if dtype not in SAFETENSORS_TYPES:
        raise ConvertError(f"dtype: {dtype!r} is not supported; supported are {', '.join(SAFETENSORS_TYPES)}")
    with atomic_directory(out) as directory:
        if directory is None:
            raise ConvertError(f"{out}: exists already")
        write_model(GgufFile(src), directory, dtype=dtype, progress=progress)
    return out


def packed_directory(src: Path, *, dtype: str, progress: Progress | None = None) -> Path:
    """The directory in the cache that serves the model in `src`, made now or by an earlier call.

    Matrices of the types in `gguf_blocks` are there as they are; `dtype` ("auto": bfloat16) is what the others are
    expanded to, and computed in. Raises ConvertError.
    """
    dtype = "bfloat16" if dtype == "auto" else dtype

    def write(file: GgufFile, directory: Path) -> None:
        write_model(file, directory, dtype=dtype, progress=progress, packed=True)

    return cached_directory(src, dtype, write)


def write_model(
    file: GgufFile, directory: Path, *, dtype: str, progress: Progress | None, packed: bool = False
) -> None:
    """Writes all files of the model into `directory`."""
    config = hf_config(file, dtype=dtype)
    kinds = packed_kinds(file, config) if packed else {}
    if kinds:
        config["quantization_config"] = {"quant_method": "gguf", "group_size": GROUP}
    write_description(file, config, directory, progress)
    write_safetensors(
        file,
        config,
        directory / "model.safetensors",
        dtype=dtype,
        packed=kinds,
        progress=lambda done, total: None if progress is None else progress("weights", done, total),
    )

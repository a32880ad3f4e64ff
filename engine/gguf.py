"""Converts a GGUF file into a model directory: safetensors, config.json, generation_config.json, tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from engine.atomic_dir import atomic_directory
from engine.gguf_config import hf_config, hf_generation_config
from engine.gguf_reader import ConvertError, GgufFile
from engine.gguf_tokenizer import build_tokenizer, read_vocabulary, tokenizer_config
from engine.gguf_weights import SAFETENSORS_TYPES, packed_kinds, write_safetensors
from engine.quantized.gguf import GROUP
from engine.weights import default_cache_dir

__all__ = ["ConvertError", "Progress", "convert_gguf", "packed_directory"]

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); stages are "tokenizer" and "weights" (in bytes)."""


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
    try:
        stat = src.stat()
    except OSError as error:
        raise ConvertError(f"{src}: {error.strerror}") from error
    identity = f"{src.resolve()}/{stat.st_size}/{stat.st_mtime_ns}/{dtype}/packed-1"
    out = default_cache_dir() / "models" / f"{src.stem}-{xxhash.xxh3_128_hexdigest(identity.encode())[:16]}"
    if not out.is_dir():
        with atomic_directory(out) as directory:
            if directory is not None:  # else another process was quicker
                write_model(GgufFile(src), directory, dtype=dtype, progress=progress, packed=True)
    return out


def write_model(
    file: GgufFile, directory: Path, *, dtype: str, progress: Progress | None, packed: bool = False
) -> None:
    """Writes all files of the model into `directory`."""
    report = progress or (lambda stage, done, total: None)
    config = hf_config(file, dtype=dtype)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        problem = f"{len(vocabulary.tokens)} tokens, but the embedding has {config['vocab_size']} rows"
        raise file.error("tokenizer.ggml.tokens", problem)
    kinds = packed_kinds(file, config) if packed else {}
    if kinds:
        config["quantization_config"] = {"quant_method": "gguf", "group_size": GROUP}
    report("tokenizer", 0, 1)
    build_tokenizer(file, vocabulary).save(str(directory / "tokenizer.json"), pretty=False)
    report("tokenizer", 1, 1)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", hf_generation_config(file, vocabulary.tokens))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file, vocabulary))
    write_safetensors(
        file,
        config,
        directory / "model.safetensors",
        dtype=dtype,
        packed=kinds,
        progress=lambda done, total: report("weights", done, total),
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

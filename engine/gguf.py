"""Converts a GGUF file into a model directory: safetensors, config.json, generation_config.json, tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.atomic_dir import atomic_directory
from engine.gguf_config import hf_config, hf_generation_config
from engine.gguf_reader import ConvertError, GgufFile
from engine.gguf_tokenizer import build_tokenizer, read_vocabulary, tokenizer_config
from engine.gguf_weights import SAFETENSORS_TYPES, write_safetensors

__all__ = ["ConvertError", "Progress", "convert_gguf"]

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


def write_model(file: GgufFile, directory: Path, *, dtype: str, progress: Progress | None) -> None:
    """Writes all files of the model into `directory`."""
    report = progress or (lambda stage, done, total: None)
    config = hf_config(file, dtype=dtype)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        problem = f"{len(vocabulary.tokens)} tokens, but the embedding has {config['vocab_size']} rows"
        raise file.error("tokenizer.ggml.tokens", problem)
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
        progress=lambda done, total: report("weights", done, total),
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""What a GGUF file says of its model beside the weights: config and tokenizer, all that a router needs. No torch."""

import json
from pathlib import Path
from typing import Any

from engine.conversion import ConvertError, Progress
from engine.gguf_cache import cached_directory
from engine.gguf_config import hf_config, hf_generation_config
from engine.gguf_reader import GgufFile
from engine.gguf_tokenizer import build_tokenizer, read_vocabulary, tokenizer_config

__all__ = ["ConvertError", "Progress", "described_directory", "write_description"]


def described_directory(src: Path, *, progress: Progress | None = None) -> Path:
    """The directory in the cache with config and tokenizer of the model in `src`, without weights.

    Made now or by an earlier call. Raises ConvertError.
    """

    def write(file: GgufFile, directory: Path) -> None:
        write_description(file, hf_config(file, dtype="bfloat16"), directory, progress)

    return cached_directory(src, "tokenizer", write)


def write_description(file: GgufFile, config: dict[str, Any], directory: Path, progress: Progress | None) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files. Raises ConvertError."""
    report = progress or (lambda stage, done, total: None)
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

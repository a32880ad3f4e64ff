"""What gateways ask of a model: a few facts of config.json, and the tokenizer's files in one zip."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pagewire.foreign.smg import common_pb2
from pagewire.foreign.smg import vllm_engine_pb2 as pb

_CHUNK_BYTES = 64 << 10
_TOKENIZER_FILES = (
    "chat_template.*",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class ModelCard:
    """A model directory under the name it is served by."""

    directory: Path
    name: str

    def info(self, *, max_model_len: int, vocab_size: int) -> pb.GetModelInfoResponse:
        """Lengths in tokens. No sampling defaults are told: a value that a request leaves out is pagewire's own."""
        config = self._config
        return pb.GetModelInfoResponse(
            model_path=str(self.directory),
            tokenizer_path=str(self.directory),
            served_model_name=self.name,
            is_generation=True,
            max_context_length=max_model_len,
            max_req_input_len=max_model_len - 1,
            vocab_size=vocab_size,
            model_type=str(config.get("model_type", "")),
            architectures=config.get("architectures") or [],
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(_token_ids(config.get("bos_token_id"))), 0),
            pad_token_id=next(iter(_token_ids(config.get("pad_token_id"))), 0),
        )

    def tokenizer_chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """The zip in pieces; the last one has its SHA-256."""
        archive, digest = self._tokenizer_zip
        for start in range(0, len(archive), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(archive)
            yield common_pb2.GetTokenizerChunk(
                data=archive[start : start + _CHUNK_BYTES], sha256=digest if is_last else ""
            )

    def pack_tokenizer(self) -> None:
        """Makes the zip, once: to be called in a thread before `tokenizer_chunks`."""
        _ = self._tokenizer_zip

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        """The language model's numbers; multimodal configs keep them one level down."""
        config: dict[str, Any] = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config")
        return {**text, **{k: v for k, v in config.items() if v is not None}} if isinstance(text, dict) else config

    @cached_property
    def _tokenizer_zip(self) -> tuple[bytes, str]:
        """The archive and its SHA-256; the same files give the same bytes everywhere."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted({p for name in _TOKENIZER_FILES for p in self.directory.glob(name) if p.is_file()}):
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
        return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


def _token_ids(value: object) -> list[int]:
    """Configs have a number, a list or nothing."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]

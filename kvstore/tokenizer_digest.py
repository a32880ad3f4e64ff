"""Do a router and the workers of a model read text alike? Both name their tokenizer by its file's digest."""

import hashlib
from pathlib import Path

from kvstore.registry import ModelRecord


def tokenizer_digest(directory: Path) -> str:
    """SHA-256 of tokenizer.json in hex; empty if the model has none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ""
    with path.open("rb") as file:  # piece by piece: what was held as a whole would stay in the process
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_mismatch(record: ModelRecord, own_digest: str) -> str | None:
    """Why a router with `own_digest` must not use the model's workers; None if it may.

    Without a digest on either side (a model of a GGUF file has its tokenizer inside) nothing can be said against it.
    """
    if not own_digest or not record.tokenizer_digest or own_digest == record.tokenizer_digest:
        return None
    return (
        f"the workers of model {record.name!r} have another tokenizer.json (sha256 {record.tokenizer_digest[:16]}…) "
        f"than this router (sha256 {own_digest[:16]}…): its token ids would mean other text to them"
    )

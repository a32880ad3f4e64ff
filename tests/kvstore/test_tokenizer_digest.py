"""A router notices that a model's workers were started with another tokenizer."""

import hashlib
from pathlib import Path

import pytest

from kvstore.registry import ModelRecord
from kvstore.tokenizer_digest import tokenizer_digest, tokenizer_mismatch


def test_digest_is_that_of_the_file(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert tokenizer_digest(tmp_path) == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize(("theirs", "own"), [("ab" * 32, "ab" * 32), ("", "ab" * 32), ("ab" * 32, ""), ("", "")])
def test_nothing_against_equal_or_unknown_tokenizers(theirs: str, own: str) -> None:
    assert tokenizer_mismatch(ModelRecord("m", b"r" * 32, theirs), own) is None


def test_another_tokenizer_is_named() -> None:
    reason = tokenizer_mismatch(ModelRecord("m", b"r" * 32, "ab" * 32), "cd" * 32)
    assert reason is not None
    assert "'m'" in reason
    assert "abababababababab…" in reason
    assert "cdcdcdcdcdcdcdcd…" in reason

"""A router whose tokenizer is not the workers' serves nobody, says why once, and recovers."""

import logging

import grpc
import pytest

from kvstore.registry import ModelRecord
from router.tokenizer_guard import TokenizerGuard

OWN, OTHER = "aa" * 32, "bb" * 32


def test_refuses_while_they_differ(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said: list[ModelRecord | None] = [None]
    guard = TokenizerGuard(OWN, lambda: said[0])
    assert guard.check() is None, "nothing is known yet"
    for digest, is_wrong in ((OWN, False), (OTHER, True), (OTHER, True), (OWN, False), ("", False)):
        said[0] = ModelRecord("m", b"r" * 32, digest)
        error = guard.check()
        assert (error is not None) == is_wrong
        if error is not None:
            assert error.code is grpc.StatusCode.FAILED_PRECONDITION
            assert error.reason == "TOKENIZER_MISMATCH"
            assert OWN[:16] in error.message
            assert OTHER[:16] in error.message
            assert dict(error.details[0].metadata) == {"router": OWN, "workers": OTHER}  # type: ignore[attr-defined]
        said[0] = None  # Redis is gone: what was known holds
        assert (guard.check() is not None) == is_wrong
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]

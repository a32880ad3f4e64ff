"""Which draft models are refused, and what is said then."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import EngineError
from engine.memory import KvMemory
from pagewire.config import EngineOptions
from tests.engine.draft.test_engine import BLOCK_BYTES, options_of, with_draft
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def check_refused(options: EngineOptions, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Engine(options)


def test_another_vocabulary_size(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model("llama", tmp_path / "draft", vocab_size=304)
    check_refused(
        with_draft(options_of(model), draft),
        r"speculative_config\.model: .*draft has a vocabulary of 304 tokens, .* one of 300; .* the same tokenizer",
    )


def test_another_tokenizer(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model("llama", tmp_path / "draft")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    first = min(vocab["a"], vocab["b"])
    check_refused(with_draft(options_of(model), draft), rf"has another tokenizer than .*: token {first} is 'b' there")


def test_the_same_vocabulary_written_otherwise(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model("llama", tmp_path / "draft")
    file = draft / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    Engine(with_draft(options_of(model), draft)).close()


def test_a_broken_tokenizer(model: Path, tmp_path: Path) -> None:
    file = make_tiny_model("llama", tmp_path / "draft") / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-99])
    check_refused(with_draft(options_of(model), file.parent), rf"speculative_config\.model: {file} is broken: ")


def test_no_such_model(model: Path, tmp_path: Path) -> None:
    check_refused(with_draft(options_of(model), tmp_path / "x"), r"speculative_config\.model: .*x: no such directory")


def test_no_room_for_both(model: Path) -> None:
    options = with_draft(options_of(model), model).model_copy(update={"kv_cache_memory_bytes": BLOCK_BYTES})
    check_refused(
        options,
        re.escape(f"block of 4 takes {2 * BLOCK_BYTES} bytes ({BLOCK_BYTES} of them for the draft model)"),
    )


def test_memory_is_shared_between_both(model: Path) -> None:
    engine = Engine(with_draft(options_of(model), model))
    try:
        assert engine.num_blocks == 43
        assert engine.memory.layout.block_bytes == BLOCK_BYTES
    finally:
        engine.close()


@pytest.mark.parametrize("prefault", [False, True])
def test_both_pools_are_prefaulted_if_asked(model: Path, monkeypatch: pytest.MonkeyPatch, *, prefault: bool) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(KvMemory, "prefault", lambda memory, threads: asked.append((memory.num_blocks, threads)))
    options = with_draft(options_of(model), model).model_copy(update={"kv_cache_prefault": prefault, "cpu_threads": 1})
    Engine(options).close()
    assert asked == ([(43, 1)] * 2 if prefault else [])

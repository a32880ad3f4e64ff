"""Loading a tokenizer from a model directory, and that it drags in neither transformers nor torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from pagewire.text.tokenizer import Tokenizer, TokenizerError, TooManyTokens
from tests.tiny_tokenizers import BOS, EOS, byte_fallback, byte_level, write_model_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model", byte_level())


def test_loads_ids_special_tokens_and_template(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("the")[0] == BOS
    assert tokenizer.encode("the", add_special_tokens=False) == [tokenizer.token_id("the")]
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "<bos><user>x\n<assistant>"
    assert tokenizer.encode("<eos>", add_special_tokens=False) == [EOS]


def test_a_text_with_too_many_tokens_is_not_listed(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert len(tokenizer.encode("abc", add_special_tokens=False, max_tokens=3)) == 3
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("abcd", add_special_tokens=False, max_tokens=3)
    assert (caught.value.num_tokens, caught.value.limit) == (4, 3)


def test_template_file_goes_before_the_config(directory: Path) -> None:
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.load(directory).chat_template.render([]) == "json"  # type: ignore[union-attr]
    (directory / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(directory).chat_template.render([]) == "jinja"  # type: ignore[union-attr]


def test_named_templates(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(directory).chat_template.render([]) == "d"  # type: ignore[union-attr]


def test_tokens_that_only_the_config_knows(directory: Path) -> None:
    count = Tokenizer.load(directory).num_tokens
    entry = {"content": "<|extra|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(count): entry}}))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("<|extra|>", add_special_tokens=False) == [count]
    assert count in tokenizer.special_token_ids
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(count + 9): entry}}))
    with pytest.raises(TokenizerError, match=f"the id {count + 9}"):
        Tokenizer.load(directory)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(write_model_directory(tmp_path, backend))
    assert len(tokenizer.encode("abcdefgh", add_special_tokens=False)) == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is broken"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is broken"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat template is broken"),
    ],
)
def test_broken_files_are_named(directory: Path, name: str, content: str, message: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(directory)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


def test_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, pagewire.text.tokenizer as t; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["", "the cat", "你好 " * 40, "<tool call>" * 50, "<eos>" * 9, "\x00\ud7ff ing" * 30])
def test_at_least_is_a_lower_bound(text: str) -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.at_least(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.at_least(text) >= len(text.encode()) // 11


def test_nothing_is_certain_of_a_tokenizer_that_may_drop_text() -> None:
    text = "the cat " * 1000
    assert Tokenizer(byte_fallback()).at_least(text) == 0
    stripping = byte_level()
    stripping.add_tokens([AddedToken("<x>", rstrip=True)])
    normalizing = byte_level()
    normalizing.normalizer = normalizers.Lowercase()
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    for backend in (stripping, normalizing, removing):
        assert Tokenizer(backend).at_least(text) == 0


def test_a_text_that_is_certainly_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level())
    monkeypatch.setattr(tokenizer, "_backend", None)
    monkeypatch.setitem(tokenizer.__dict__, "_longest_token", 11)
    with pytest.raises(TooManyTokens, match="at least 91 tokens, the limit is 90") as caught:
        tokenizer.encode("x" * 1000, max_tokens=90)
    assert not caught.value.is_exact

"""A tokenizer assembled from its file is the one that the library loads."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from pagewire.text import tokenizer_file
from tests.tiny_tokenizers import byte_fallback, byte_level

TEXT = "Hello  wörld ▁ <|end|> 日本 x<new>y <bos>"


def _with_added_tokens() -> Tokenizer:
    tokenizer = byte_fallback(metaspace=True)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<new>", lstrip=True), AddedToken("wörld", normalized=True, single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<also>", rstrip=True, normalized=False)])
    return tokenizer


def _saved(tokenizer: Tokenizer, path: Path, change: Callable[[dict[str, Any]], None] = lambda content: None) -> Path:
    content = json.loads(tokenizer.to_str())
    change(content)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [byte_level, byte_fallback, _with_added_tokens])
@pytest.mark.parametrize("are_texts", [False, True])
def test_it_is_what_the_library_loads(make: Callable[[], Tokenizer], are_texts: bool, tmp_path: Path) -> None:
    def old_form(content: dict[str, Any]) -> None:
        if are_texts:
            content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]

    path = _saved(make(), tmp_path / "tokenizer.json", old_form)
    found, wanted = tokenizer_file.assembled(path), Tokenizer.from_file(str(path))
    assert found is not None
    assert json.loads(found.to_str()) == json.loads(wanted.to_str())
    for special in (True, False):
        assert found.encode(TEXT, add_special_tokens=special).ids == wanted.encode(TEXT, add_special_tokens=special).ids
    added = {number: (str(each), each.special) for number, each in wanted.get_added_tokens_decoder().items()}
    assert {number: (str(each), each.special) for number, each in found.get_added_tokens_decoder().items()} == added


def test_others_are_left_to_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "_LARGE_BYTES", 0)

    def moved(content: dict[str, Any]) -> None:
        content["added_tokens"][-1]["id"] += 1000  # the library warns, and goes by the order

    def unknown(content: dict[str, Any]) -> None:
        content["model"]["new_option"] = 1

    def with_header(content: dict[str, Any]) -> None:
        content["model"]["merges"] = ["t t", "#version t"]  # the library takes the first one alone

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain = Tokenizer(models.BPE({"t": 0, "tt": 1, "#version": 2, "#versiont": 3}, []))
    paths = [
        _saved(words, tmp_path / "words.json"),
        _saved(_with_added_tokens(), tmp_path / "moved.json", moved),
        _saved(byte_level(), tmp_path / "unknown.json", unknown),
        _saved(plain, tmp_path / "header.json", with_header),
    ]
    for path in paths:
        assert tokenizer_file.assembled(path) is None
        found, wanted = tokenizer_file.load_backend(path), Tokenizer.from_file(str(path))
        assert json.loads(found.to_str()) == json.loads(wanted.to_str())
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(Exception, match="EOF"):
        tokenizer_file.load_backend(broken)
    assert gc.isenabled()


def test_what_the_library_refuses_is_refused_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(content: dict[str, Any]) -> None:
        content["model"]["merges"][0] = " ".join(content["model"]["merges"][0])

    def panics(content: dict[str, Any]) -> None:
        content["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}  # longer than its longest token

    for number, change in enumerate((mixed, panics)):
        path = _saved(byte_level(), tmp_path / f"{number}.json", change)
        for least_size in (0, 4 << 20):
            monkeypatch.setattr(tokenizer_file, "_LARGE_BYTES", least_size)
            with pytest.raises(Exception, match=r"untagged enum MergeType|out of range"):
                tokenizer_file.load_backend(path)
    utf_16 = tmp_path / "utf-16.json"
    utf_16.write_text(byte_level().to_str(), encoding="utf-16")
    monkeypatch.setattr(tokenizer_file, "_LARGE_BYTES", 0)
    with pytest.raises(Exception, match="UTF-8"):
        tokenizer_file.load_backend(utf_16)

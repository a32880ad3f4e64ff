"""Large BPE models without the library's own loader, so that less memory stays behind.

That one parses the whole file into a tree and copies what it keeps; what is freed lies between what is kept, in pieces
too small to be given back. Here Python parses, in memory of its own, and the model is made of its dicts and lists. Left
in the process of Gemma's vocabulary (262144 tokens), in as much time: 79 MB instead of 97.
"""

import gc
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as BackendTokenizer

from pagewire.free_memory import release_free_memory

_LARGE_BYTES = 4 << 20
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_OPTIONS = {
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_backend(path: Path) -> BackendTokenizer:
    """Raises whatever `tokenizers` does for a broken file: bare Exceptions; a ValueError where it panics."""
    tokenizer = assembled(path) if path.stat().st_size >= _LARGE_BYTES else None
    if tokenizer is None:
        try:
            tokenizer = BackendTokenizer.from_file(str(path))
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise ValueError(str(error)) from error
    release_free_memory()  # what parsing needed: 200 MB for Gemma's
    return tokenizer


def assembled(path: Path) -> BackendTokenizer | None:
    """Equal to what `from_file` makes, truncation and padding left out; None for a file that is not of this kind."""
    collects = gc.isenabled()
    gc.disable()  # a million small lists and no cycle: a third of the time
    try:
        return _assembled(json.loads(path.read_text(encoding="utf-8")))
    except BaseException as error:  # whatever it is, the library may know it, or say what is wrong
        if isinstance(error, Exception) or _is_panic(error):
            return None
        raise
    finally:
        if collects:
            gc.enable()


def _assembled(content: dict[str, Any]) -> BackendTokenizer | None:
    model, added = content.pop("model"), content.pop("added_tokens", [])
    if model.pop("type", None) != "BPE":
        return None
    merges, vocabulary = _merges(model.pop("merges")), model.pop("vocab")
    if merges is None or model.keys() - _OPTIONS:
        return None
    options = {name: value for name, value in model.items() if value is not None}
    tokenizer = BackendTokenizer(models.BPE(vocabulary, merges, **options))
    steps = BackendTokenizer.from_str(json.dumps({**content, "model": _NO_MODEL, "added_tokens": []}))
    for name in _STEPS:
        if (step := getattr(steps, name)) is not None:
            setattr(tokenizer, name, step)
    tokenizer.add_tokens([AddedToken(each["content"], **{flag: each[flag] for flag in _FLAGS}) for each in added])
    return tokenizer if all(tokenizer.token_to_id(each["content"]) == each["id"] for each in added) else None


def _merges(stored: list[Any]) -> list[tuple[str, str]] | None:
    """All of them pairs, or all of them texts with a space. None for both, and where the library leaves some out."""
    kinds = {type(each) for each in stored}
    if kinds == {str}:
        if any(each.startswith("#version") for each in stored):
            return None
        stored = [each.split(" ") for each in stored]
    elif kinds - {list}:
        return None
    return [(left, right) for left, right in stored]


def _is_panic(error: BaseException) -> bool:
    """The library's own bug, or a file that it did not expect; its class has no module to import it from."""
    return type(error).__name__ == "PanicException"

"""Text to token ids and back, straight on `tokenizers`: neither transformers nor torch is imported."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from pagewire.text.chat_template import ChatTemplate, ChatTemplateError
from pagewire.text.detokenizer import DecoderPlan, Detokenizer, PieceTable, UnsupportedDecoder, detokenize
from pagewire.text.tokenizer_file import load_backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The model directory holds no tokenizer that can be used."""


class TooManyTokens(ValueError):
    """A text has more tokens than the caller can use."""

    def __init__(self, num_tokens: int, limit: int, *, is_exact: bool = True) -> None:
        super().__init__(f"{'' if is_exact else 'at least '}{num_tokens} tokens, the limit is {limit}")
        self.num_tokens = num_tokens
        self.is_exact = is_exact
        self.limit = limit


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        backend: BackendTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        try:
            plan = DecoderPlan.parse(_decoder_of(backend))
        except UnsupportedDecoder as error:
            raise TokenizerError(f"this tokenizer cannot stream text: {error}") from error
        self._table = PieceTable(plan, backend.id_to_token, self.special_token_ids)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """From tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja / .json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist; pagewire needs a fast tokenizer")
        try:
            backend = load_backend(path)
        except Exception as error:  # `tokenizers` raises bare Exception for a broken file
            raise TokenizerError(f"{path} is broken: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        _add_tokens_of_config(backend, config)
        special_tokens = _special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
        source = _chat_template_source(directory, config)
        try:
            template = None if source is None else ChatTemplate(source, special_tokens)
        except ChatTemplateError as error:
            raise TokenizerError(f"{directory}: {error}") from error
        return cls(backend, special_tokens=special_tokens, chat_template=template)

    @property
    def num_tokens(self) -> int:
        """Tokens in the vocabulary, added ones included; the model's own vocab_size may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Text to ids. The batch form is used because it releases the GIL.

        Raises TooManyTokens above `max_tokens`: at once if that is certain, else before a long list is made (which does
        hold the GIL).
        """
        if max_tokens is not None and (at_least := self.at_least(text)) > max_tokens:
            raise TooManyTokens(at_least, max_tokens, is_exact=False)
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding), max_tokens)
        return list(encoding.ids)

    def at_least(self, text: str) -> int:
        """Tokens that a text has for certain, known without tokenizing it; 0 if this tokenizer may drop text."""
        longest = self._longest_token
        return -(-len(text.encode(errors="replace")) // longest) if longest else 0

    @cached_property
    def _longest_token(self) -> int:
        """Most bytes of a text that one token can stand for; 0 where that has no limit.

        It has one if the text is taken byte by byte, unchanged: no normalizer, nothing removed, every byte a token.
        """
        backend = self._backend
        pre_tokenizer = "" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__().decode()
        added = backend.get_added_tokens_decoder().values()
        if backend.normalizer is not None or '"ByteLevel"' not in pre_tokenizer or '"Removed"' in pre_tokenizer:
            return 0
        if any(token.lstrip or token.rstrip for token in added):
            return 0
        own = backend.get_vocab(with_added_tokens=False)
        if any(character not in own for character in ByteLevel.alphabet()):
            return 0
        return max(max(map(len, own)), max((len(token.content.encode()) for token in added), default=0))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids of a text from its start."""
        return detokenize(self._table, token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For an output that continues a prompt."""
        return Detokenizer(self._table, skip_special_tokens=skip_special_tokens, continues=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for inside a text, maybe a part of a character; empty for an id without a token."""
        piece = self._table.piece(token_id)
        return b"" if piece is None else piece.encode() if isinstance(piece, str) else piece

    def token_id(self, token: str) -> int | None:
        """Id of a token by its own name, special ones included."""
        return self._backend.token_to_id(token)


def _decoder_of(backend: BackendTokenizer) -> dict[str, object] | None:
    """The decoder as tokenizer.json has it. (`backend.to_str()` would write the vocabulary too: 2 s for Gemma's.)"""
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is broken: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is broken: not a JSON object")
    return content


def _token_text(token: object) -> str | None:
    """Special tokens are written as text or as {"content": text, …}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found = ((name, _token_text(config.get(name))) for name in _SPECIAL_NAMES)
    return {name: text for name, text in found if text is not None}


def _add_tokens_of_config(backend: BackendTokenizer, config: Mapping[str, object]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return
    entries: Iterable[tuple[int, object]] = sorted((int(token_id), entry) for token_id, entry in decoder.items())
    for token_id, entry in entries:
        text = _token_text(entry)
        if text is None or not isinstance(entry, Mapping) or backend.id_to_token(token_id) is not None:
            continue
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = AddedToken(text, special=bool(entry.get("special")), **flags)
        add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
        add([token])
        if backend.token_to_id(text) != token_id:
            raise TokenizerError(f"tokenizer_config.json gives {text!r} the id {token_id}, tokenizer.json another one")


def _chat_template_source(directory: Path, config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, then chat_template.json, then tokenizer_config.json (a text or a list of named ones)."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None

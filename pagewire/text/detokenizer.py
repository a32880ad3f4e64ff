"""Token ids to text, one token at a time; what comes out are always whole UTF-8 characters.

A tokenizer's decoder is read once (`DecoderPlan`) and then every token is a *piece*: `bytes` that may be a part of a
character, or `str`. That makes the incremental text exactly the full text, without decoding windows twice:

    byte-level BPE   every piece is bytes; all pieces together are UTF-8       (Qwen, Llama 3, SmolLM)
    byte fallback    a piece is str, or one byte <0xNN>; a run of bytes is UTF-8  (Gemma, Llama 2, Mistral)

Bytes that are no UTF-8 become U+FFFD: one for each maximal broken part in byte-level BPE (as `str.decode` and Hugging
Face do), one for each byte in byte fallback (as Hugging Face does; other than there, the whole characters around a
broken byte survive, since they were streamed already).
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

Piece = str | bytes | None

_EACH_BYTE = "pagewire-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD once for every byte that is not part of a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)
_UTF8 = codecs.getincrementaldecoder("utf-8")


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder has a step whose text cannot be made token by token."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(256 + number), byte) for number, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """What the `decoder` of a tokenizer.json does to a token.

    `strip_start` spaces at most are taken off the start of the text. `drop_in_first` is the character that vanishes
    from the first token (Metaspace); elsewhere `replacements` apply.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_start: int = 0
    drop_in_first: str = ""

    @classmethod
    def parse(cls, decoder: Mapping[str, object] | None) -> "DecoderPlan":
        """Raises UnsupportedDecoder for a decoder that this file cannot follow exactly."""
        if decoder is None:
            raise UnsupportedDecoder("tokenizer.json has no decoder")
        kind = decoder.get("type")
        steps = decoder.get("decoders") if kind == "Sequence" else [decoder]
        if not isinstance(steps, list) or not steps:
            raise UnsupportedDecoder("tokenizer.json has an empty decoder sequence")
        plan = cls()
        for number, step in enumerate(steps):
            if step.get("type") == "Strip" and not any(earlier.get("type") == "Fuse" for earlier in steps[:number]):
                raise UnsupportedDecoder("decoder step Strip before Fuse")
            plan = plan._with_step(step)
        if plan.byte_level and (plan.byte_fallback or plan.replacements or plan.strip_start):
            raise UnsupportedDecoder("decoder step ByteLevel together with others")
        return plan

    def _with_step(self, step: Mapping[str, object]) -> "DecoderPlan":
        kind = step.get("type")
        replacements, drop_in_first = self.replacements, self.drop_in_first
        byte_level, byte_fallback, strip_start = self.byte_level, self.byte_fallback, self.strip_start
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace":
            pattern, content = step.get("pattern"), step.get("content")
            text = pattern.get("String") if isinstance(pattern, Mapping) else None
            if not isinstance(text, str) or len(text) != 1 or not isinstance(content, str):
                raise UnsupportedDecoder(f"decoder step Replace with the pattern {pattern!r}")
            replacements = (*replacements, (text, content))
        elif kind == "Metaspace":
            text = step.get("replacement", "▁")
            if not isinstance(text, str):
                raise UnsupportedDecoder(f"decoder step Metaspace with the replacement {text!r}")
            replacements = (*replacements, (text, " "))
            drop_in_first = "" if step.get("prepend_scheme", "always") == "never" else text
        elif kind == "Strip":
            if step.get("content") != " " or step.get("stop", 0) != 0:
                raise UnsupportedDecoder(f"decoder step {dict(step)!r}")
            start = step.get("start", 0)
            strip_start = start if isinstance(start, int) else 0
        elif kind != "Fuse":
            raise UnsupportedDecoder(f"decoder step {kind!r}")
        return DecoderPlan(byte_level, byte_fallback, replacements, strip_start, drop_in_first)

    def piece(self, token: str, *, first: bool = False) -> str | bytes:
        """What one token stands for; `first` if it begins a text."""
        if self.byte_level:
            known = [_BYTE_OF.get(char, -1) for char in token]
            return token.encode() if -1 in known else bytes(known)
        if first and self.drop_in_first:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token
        return token


class _WholeTexts(dict[int, str | None]):
    """Token id -> its text wherever no bytes wait, filled on demand; None: its bytes are no whole characters."""

    def __init__(self, table: "PieceTable", skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        piece = None if token_id in self._skipped else self._table.make_piece(token_id)
        text: str | None
        if isinstance(piece, bytes):
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                text = None
        else:
            text = piece or ""
        self[token_id] = text
        return text


class PieceTable:
    """Token id -> piece, filled on demand; shared by all detokenizers of a tokenizer."""

    def __init__(
        self, plan: DecoderPlan, id_to_token: Callable[[int], str | None], special_ids: frozenset[int]
    ) -> None:
        self.plan = plan
        self.special_ids = special_ids
        self._id_to_token = id_to_token
        self._pieces: dict[int, Piece] = {}
        self._whole_texts = {skip: _WholeTexts(self, special_ids if skip else frozenset()) for skip in (True, False)}

    def piece(self, token_id: int) -> Piece:
        """The piece of a token inside a text; None for an id without a token (padding of the vocabulary)."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self.make_piece(token_id)
            return piece

    def make_piece(self, token_id: int, *, first: bool = False) -> Piece:
        """The same, not remembered; `first` if it begins a text."""
        token = self._id_to_token(token_id)
        return None if token is None else self.plan.piece(token, first=first)

    def whole_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Token id -> what it adds to a text in which no bytes wait for more; None if that are not whole characters."""
        return self._whole_texts[skip_special_tokens]


class Detokenizer:
    """One text in the making. With `continues`, it goes on after a prompt, so a leading space is text."""

    def __init__(self, table: PieceTable, *, skip_special_tokens: bool = True, continues: bool = True) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._whole_texts = table.whole_texts(skip_special_tokens=skip_special_tokens)
        self._bytes = _UTF8("replace" if table.plan.byte_level else _EACH_BYTE)
        self._first = not continues
        self._to_strip = 0 if continues else table.plan.strip_start
        # Neither is this the text's start nor do bytes wait: a token's text depends on the token alone.
        self._is_plain = continues

    def copy(self) -> "Detokenizer":
        """The same text so far, to go on in another way."""
        other = copy(self)
        other._bytes = copy(self._bytes)
        return other

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty while a character is incomplete."""
        if self._is_plain and (text := self._whole_texts[token_id]) is not None:
            return text
        text = self._push(token_id)
        self._is_plain = not (self._first or self._to_strip or self._bytes.getstate()[0])
        return text

    def _push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.make_piece(token_id, first=True) if self._first else self._table.piece(token_id)
        if piece is None:
            return ""
        self._first = False
        text = self._bytes.decode(piece) if isinstance(piece, bytes) else self._close_run() + piece
        return self._strip(text) if self._to_strip else text

    def flush(self) -> str:
        """The rest at the end of the text: U+FFFD for a character that stayed incomplete."""
        text = self._close_run()
        return self._strip(text) if self._to_strip else text

    def _close_run(self) -> str:
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text

    def _strip(self, text: str) -> str:
        while text and self._to_strip:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


def detokenize(table: PieceTable, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The whole text of a sequence that begins a text."""
    detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens, continues=False)
    return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()

"""Incremental text: equal to the full text, whole characters only, as Hugging Face's decoders have it."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pagewire.text.detokenizer import DecoderPlan, Detokenizer, UnsupportedDecoder
from pagewire.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import BOS, EOS, byte_fallback, byte_level

BACKENDS: dict[str, Backend] = {
    "byte_level": byte_level(),
    "gemma": byte_fallback(),
    "llama2": byte_fallback(strip=True),
    "metaspace": byte_fallback(metaspace=True),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
KINDS = sorted(TOKENIZERS)
NUM_IDS = max(tokenizer.num_tokens for tokenizer in TOKENIZERS.values()) + 3  # ids without a token are tried too
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" the你好世界👩‍👩‍👧é한국어\n")), max_size=40)
IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=30)
EACH = settings(max_examples=150, deadline=None)


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


def byte_runs_are_utf8(backend: Backend, token_ids: Sequence[int], *, skip: bool) -> bool:
    """Hugging Face breaks a whole run of byte tokens when one of them is wrong; we keep the whole characters.

    Special tokens that are not skipped end a run.
    """
    run = b""
    for token_id in [*token_ids, None]:
        token = None if token_id is None else backend.id_to_token(token_id)
        is_skipped = token is None or (skip and token_id in TOKENIZERS["gemma"].special_token_ids)
        if token_id is not None and is_skipped:
            continue
        if token is not None and len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@EACH
def test_text_survives_the_round_trip(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if "▁" in text or (kind == "metaspace" and text.startswith(" ")):
        return  # the tokenizer itself cannot tell these from spaces
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=IDS, skip=st.booleans())
@example(token_ids=[4, 198, 0, 132], skip=False)
@EACH
def test_pieces_add_up_and_equal_hugging_face(kind: str, token_ids: list[int], skip: bool) -> None:
    tokenizer, backend = TOKENIZERS[kind], BACKENDS[kind]
    # After an "a", which takes the quirks of a text's start upon itself, a text is a continuation.
    start = tokenizer.token_id("a")
    assert start is not None
    whole = tokenizer.decode([start, *token_ids], skip_special_tokens=skip)
    assert "a" + "".join(stream(tokenizer, token_ids, skip=skip)) == whole
    if kind == "byte_level" or byte_runs_are_utf8(backend, token_ids, skip=skip):
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == backend.decode(token_ids, skip)


class _EachByItsBytes(Detokenizer):
    """Never takes a token's text from the table of whole texts."""

    def push(self, token_id: int) -> str:
        self._is_plain = False
        return super().push(token_id)


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=IDS, skip=st.booleans(), continues=st.booleans(), copied_at=st.integers(0, 30))
@EACH
def test_remembered_texts_are_those_of_the_bytes(
    kind: str, token_ids: list[int], skip: bool, continues: bool, copied_at: int
) -> None:
    table = TOKENIZERS[kind]._table
    quick = Detokenizer(table, skip_special_tokens=skip, continues=continues)
    slow = _EachByItsBytes(table, skip_special_tokens=skip, continues=continues)
    for number, token_id in enumerate(token_ids):
        if number == copied_at:
            quick = quick.copy()
        assert quick.push(token_id) == slow.push(token_id)
    assert quick.flush() == slow.flush()


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
@EACH
def test_valid_text_never_shows_a_replacement_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in pieces)
    assert all(piece.encode() for piece in pieces if piece)  # no lone surrogates


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_one_character_arrive_one_by_one(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("한", add_special_tokens=False)
    token_ids = token_ids[-3:]
    assert stream(tokenizer, token_ids) == ["", "", "한", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_stays_incomplete_is_flushed(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("x👩", add_special_tokens=False)[:-1]
    text = "".join(stream(tokenizer, token_ids))
    assert text.strip().rstrip("\ufffd") == "x"
    assert text.endswith("\ufffd")


def test_a_broken_byte_costs_itself_only() -> None:
    tokenizer = TOKENIZERS["gemma"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in ("한".encode() + b"\xff" + "국".encode())]
    assert "".join(stream(tokenizer, ids)) == "한\ufffd국"


def test_an_output_goes_on_after_the_prompt_with_its_leading_space() -> None:
    for kind in ("llama2", "metaspace"):
        tokenizer = TOKENIZERS[kind]
        token_ids = tokenizer.encode("the and", add_special_tokens=False)
        assert tokenizer.decode(token_ids) == "the and"
        assert "".join(stream(tokenizer, token_ids)) == " the and"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [BOS, *tokenizer.encode("<tool call>x", add_special_tokens=False), EOS]
    assert "".join(stream(tokenizer, ids)) == "<tool call>x"
    assert "".join(stream(tokenizer, ids, skip=False)) == "<bos><tool call>x<eos>"


def test_unknown_decoders_are_refused_by_name() -> None:
    for decoder in ({"type": "WordPiece"}, None, {"type": "Sequence", "decoders": []}, {"type": "CTC"}):
        with pytest.raises(UnsupportedDecoder):
            DecoderPlan.parse(decoder)
    with pytest.raises(UnsupportedDecoder, match="Strip before Fuse"):
        DecoderPlan.parse({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    with pytest.raises(UnsupportedDecoder, match="Regex"):
        DecoderPlan.parse({"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "})

"""Tokenizers built from GGUF vocabularies, against SentencePiece's algorithm written out plainly."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from engine.conversion import ConvertError
from engine.demo_model import prepare_demo_model
from engine.gguf_reader import GgufFile
from engine.gguf_tokenizer import build_tokenizer, read_vocabulary, sentencepiece_merges

SPACE = "▁"


def sentencepiece(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[str]:
    """SentencePiece BPE: user-defined pieces first (longest match), then the best-scored pair again and again."""
    fixed = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED}
    score = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == TokenType.NORMAL}
    text = text.replace(" ", SPACE)
    longest = max((len(token) for token in fixed), default=0)
    pieces: list[str] = []
    position = 0
    while position < len(text):
        match = next(
            (text[position : position + n] for n in range(longest, 0, -1) if text[position : position + n] in fixed),
            text[position],
        )
        pieces.append(match)
        position += len(match)
    while True:
        pairs = [
            (-score[left + right], index)
            for index, (left, right) in enumerate(pairwise(pieces))
            if left not in fixed and right not in fixed and left + right in score
        ]
        if not pairs:
            break
        _, index = min(pairs)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    known = set(tokens)
    return [
        part
        for piece in pieces
        for part in ([piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


def _write_vocabulary(path: Path, *, pieces: list[tuple[str, int]], add_space_prefix: bool = False) -> Path:
    """A GGUF file with nothing but a SentencePiece vocabulary: specials, all bytes, then `pieces` (token, type)."""
    vocabulary = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2)]
    vocabulary += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    vocabulary += pieces
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(512)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_scores([-float(i) if kind == 1 else -1000.0 for i, (_, kind) in enumerate(vocabulary)])
    writer.add_token_types([kind for _, kind in vocabulary])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(add_space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_vocabulary(seed: int) -> list[tuple[str, int]]:
    """Letters, pieces joined at random from shorter ones, and runs of spaces as Gemma has them."""
    random_ = random.Random(seed)
    letters = [*"abcde", SPACE]
    joined = list(letters)
    while len(joined) < 40:
        piece = random_.choice(joined) + random_.choice(joined)
        if piece not in joined and len(piece) <= 6 and SPACE * 2 not in piece:
            joined.append(piece)
    extra = random_.sample(joined[len(letters) :], k=34)
    runs = [(SPACE * n, 4) for n in range(2, 8)]
    return [("\n", 4), ("\n\n", 4), ("<b>", 4), *runs, *((piece, 1) for piece in extra), *((c, 1) for c in letters)]


@pytest.mark.parametrize("seed", range(8))
def test_the_tokenizer_splits_as_sentencepiece_does(seed: int, tmp_path: Path) -> None:
    file = GgufFile(_write_vocabulary(tmp_path / "v.gguf", pieces=_random_vocabulary(seed)))
    vocabulary = read_vocabulary(file)
    tokenizer = build_tokenizer(file, vocabulary)
    scores = file.list_of("tokenizer.ggml.scores", float)
    random_ = random.Random(seed)
    for _ in range(60):
        text = "".join(
            random_.choices(["a", "b", "c", "d", "e", " ", "\n", "<b>", "é", "🚀"], [5] * 5 + [6, 1, 1, 1, 1], k=30)
        )
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<bos>", *sentencepiece(text, vocabulary.tokens, scores, vocabulary.types)]
        assert tokenizer.decode(encoding.ids) == text


def test_a_space_prefix_is_added_and_taken_away_again(tmp_path: Path) -> None:
    pieces = [(SPACE + "ab", 1), ("ab", 1), (SPACE + "a", 1), ("a", 1), ("b", 1), (SPACE, 1)]
    file = GgufFile(_write_vocabulary(tmp_path / "v.gguf", pieces=pieces, add_space_prefix=True))
    tokenizer = build_tokenizer(file, read_vocabulary(file))
    encoding = tokenizer.encode("ab ab")
    assert encoding.tokens == ["<bos>", SPACE + "ab", SPACE + "ab"]
    assert tokenizer.decode(encoding.ids) == "ab ab"


def test_specials_are_special_and_user_defined_pieces_are_not(tmp_path: Path) -> None:
    file = GgufFile(_write_vocabulary(tmp_path / "v.gguf", pieces=_random_vocabulary(0)))
    tokenizer = build_tokenizer(file, read_vocabulary(file))
    ids = tokenizer.encode("a<eos><b>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<b>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>a<eos><b>"


def test_merges_rank_by_score_and_leave_other_pieces_alone() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", "<ab>", SPACE * 2, SPACE]
    types = [1, 1, 1, 1, 1, 1, 4, 4, 1]
    scores = [-9.0, -9.0, -9.0, -3.0, -1.0, -2.0, 0.0, -1000.0, -9.0]
    assert sentencepiece_merges(tokens, scores, types) == [
        (SPACE, SPACE),
        ("b", "c"),
        ("ab", "c"),
        ("a", "bc"),
        ("a", "b"),
    ]


BROKEN: dict[str, dict[str, Any]] = {
    "tokenizer.ggml.model: 'rwkv' is not supported": {"tokenizer_model": "rwkv"},
    "tokenizer.ggml.tokens: the same token appears twice": {"token_list": ["a", "a"]},
    "tokenizer.ggml.scores: 1 entries for 2 tokens": {"token_scores": [1.0]},
    "tokenizer.ggml.token_type: 1 entries for 2 tokens": {"token_types": [1]},
    "tokenizer.ggml.eos_token_id: 7 is not in the vocabulary of 2 tokens": {"eos_token_id": 7},
    "tokenizer.ggml.pre: 'klingon' is not supported": {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "klingon",
        "token_merges": ["a b"],
    },
    "tokenizer.ggml.merges: missing": {"tokenizer_model": "gpt2"},
    "tokenizer.ggml.merges: ": {"tokenizer_model": "gpt2", "token_merges": ["x y"]},
    "tokenizer.ggml.merges: a merge is not two tokens": {"tokenizer_model": "gpt2", "token_merges": ["xy"]},
}


@pytest.mark.parametrize("message", list(BROKEN))
def test_broken_vocabularies_are_named(message: str, tmp_path: Path) -> None:
    fields = {"tokenizer_model": "llama", "token_list": ["a", "b"], **BROKEN[message]}
    writer = GGUFWriter(tmp_path / "v.gguf", "llama")
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GgufFile(tmp_path / "v.gguf")
    with pytest.raises(ConvertError) as caught:
        build_tokenizer(file, read_vocabulary(file))
    assert message in str(caught.value)


# --- the demo model's own vocabulary, 262144 tokens


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_file(str(prepare_demo_model() / "tokenizer.json"))


def test_gemma_ids_are_the_published_ones(demo: Tokenizer) -> None:
    assert demo.get_vocab_size() == 262144
    chat = demo.encode("<start_of_turn>user\nHello world<end_of_turn>\n<start_of_turn>model\n", add_special_tokens=True)
    assert chat.ids == [2, 105, 2364, 107, 9259, 1902, 106, 107, 105, 4368, 107]


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over 13 lazy dogs.",
        "def f(x):\n    if x > 10:\n\t\treturn  x ** 2\n\n\n",
        "人工智能是计算机科学的一个分支，它企图了解智能的实质。",
        "🚀👩‍👩‍👧‍👦 émojis ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\ufeff\x00",
        "   leading and trailing   " + " " * 70,
        "<table><td>html</td> [multimodal] <unused7>",
    ],
)
def test_gemma_texts_round_trip(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text, add_special_tokens=False).ids
    assert demo.decode(ids, skip_special_tokens=False) == text

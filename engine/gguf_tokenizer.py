"""Builds tokenizer.json from the vocabulary in a GGUF file: SentencePiece BPE ("llama"), byte-level BPE ("gpt2")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.gguf_reader import GgufFile

_SPACE = "▁"  # SentencePiece's space
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_BYTE_LEVEL_ONLY = ("gpt-2", "gpt2", "default")  # ByteLevel's own regex
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file in id order, their types, and the ids with a role."""

    tokens: list[str]
    types: list[int]
    bos: str | None
    eos: str | None
    unk: str | None
    pad: str | None
    add_bos: bool
    add_eos: bool

    def of_type(self, *types: TokenType) -> list[str]:
        """Tokens of the given types, in id order."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Reads the tokens and their roles."""
    tokens: list[str] = file.list_of("tokenizer.ggml.tokens", str)
    types = [int(TokenType.NORMAL)] * len(tokens)
    if file.get("tokenizer.ggml.token_type") is not None:
        types = file.list_of("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"{len(types)} entries for {len(tokens)} tokens")

    def role(key: str) -> str | None:
        index = file.token_id(key)
        if index is None:
            return None
        if not 0 <= index < len(tokens):
            raise file.error(f"tokenizer.ggml.{key}", f"{index} is not in the vocabulary of {len(tokens)} tokens")
        return tokens[index]

    is_llama_bpe = file.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    spm = file.get("tokenizer.ggml.model") == "llama"
    return Vocabulary(
        tokens=tokens,
        types=types,
        bos=role("bos_token_id"),
        eos=role("eos_token_id"),
        unk=role("unknown_token_id"),
        pad=role("padding_token_id"),
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", spm or is_llama_bpe)),
        add_eos=bool(file.get("tokenizer.ggml.add_eos_token", False)),
    )


def build_tokenizer(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """A complete tokenizer, specials and template included."""
    if len(set(vocabulary.tokens)) != len(vocabulary.tokens):
        raise file.error("tokenizer.ggml.tokens", "the same token appears twice")
    model = file.string("tokenizer.ggml.model")
    if model == "llama":
        tokenizer = _sentencepiece(file, vocabulary)
    elif model == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    else:
        raise file.error("tokenizer.ggml.model", f"{model!r} is not supported; supported are 'llama' and 'gpt2'")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary.of_type(TokenType.CONTROL)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in vocabulary.of_type(TokenType.USER_DEFINED)]
    )
    before = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos else []
    after = [vocabulary.eos] if vocabulary.add_eos and vocabulary.eos else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, vocabulary.tokens.index(token)) for token in {*before, *after}],
        )
    return tokenizer


def tokenizer_config(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template if the file has one."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unk,
        "pad_token": vocabulary.pad,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer(f"{file.architecture}.context_length"),
    }
    if file.get("tokenizer.chat_template") is not None:
        config["chat_template"] = file.string("tokenizer.chat_template")
    return {key: value for key, value in config.items() if value is not None}


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE with byte fallback; merges follow from the scores."""
    scores = file.list_of("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise file.error("tokenizer.ggml.scores", f"{len(scores)} entries for {len(vocabulary.tokens)} tokens")
    unknown = vocabulary.of_type(TokenType.UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=sentencepiece_merges(vocabulary.tokens, scores, vocabulary.types),
            unk_token=vocabulary.unk or (unknown[0] if unknown else None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def sentencepiece_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merge list that reproduces SentencePiece's BPE: any two pieces whose join is a piece, best score first.

    User-defined pieces are matched before any merge and never merged. Runs of spaces are such pieces too (Gemma), but
    appear in text only after normalization, where added tokens are not looked for: they get merges of their own, before
    all others, longest left part first, which forms the longest run from the left as SentencePiece does.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    runs = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == TokenType.USER_DEFINED and token and not token.strip(_SPACE)
    }
    index = {token: position for position, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        parts = normal if token in normal else (runs | {_SPACE} if token in runs else ())
        best = -float("inf") if token in runs else -score
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                ranked.append((best, -len(left), -len(right), index[left], index[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2 style BPE over bytes; the merges are in the file."""
    pre = file.string("tokenizer.ggml.pre", "default")
    if pre not in (*_SPLITS, *_SINGLE_DIGITS, *_BYTE_LEVEL_ONLY):
        raise file.error("tokenizer.ggml.pre", f"{pre!r} is not supported")
    merges = [tuple(merge.split(" ")) for merge in file.list_of("tokenizer.ggml.merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise file.error("tokenizer.ggml.merges", "a merge is not two tokens")
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=merges,
            ignore_merges=_SPLITS.get(pre) == _LLAMA3,
        )
    except Exception as error:  # what the tokenizers package raises has no class of its own
        raise file.error("tokenizer.ggml.merges", str(error)) from error
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if _SPLITS.get(pre) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

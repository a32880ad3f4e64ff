"""Tokenizers made on the spot, without torch: byte-level BPE (Qwen, Llama 3) and byte fallback (Gemma, Llama 2)."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("the", "and", "ing", "Wörter", "你好", "世界", "▁the", "▁and", "▁你", "ll", "he", "▁▁", "▁")


def byte_level() -> Tokenizer:
    """3 specials, 256 bytes, a few merges, one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *alphabet))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("ä", "½"), ("ä½", "ł"), ("ð", "Ł")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    _add_specials(tokenizer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool = False, metaspace: bool = False) -> Tokenizer:
    """Gemma's shape; `strip` makes it Llama 2's, `metaspace` the shape of converted SentencePiece models."""
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, "<unk>"))}
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    characters = sorted({char for word in WORDS for char in word} | {chr(code) for code in range(0x21, 0x7F)})
    for char in characters:
        vocabulary.setdefault(char, len(vocabulary))
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([
            decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)
        ])  # fmt: skip
    else:
        prepend = [normalizers.Prepend("▁")] if strip else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    _add_specials(tokenizer)
    return tokenizer


def _add_specials(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )


def write_model_directory(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """What the router reads of a model: config.json, generation_config.json and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128, "eos_token_id": EOS, **config}
    (directory / "config.json").write_text(json.dumps(facts))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": facts["eos_token_id"]}))
    special = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return directory

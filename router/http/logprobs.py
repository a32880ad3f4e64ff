"""Log-probabilities in OpenAI's two forms: a list of objects for chat, parallel lists for completions."""

from collections.abc import Sequence
from typing import Any

from pagewire.text.tokenizer import Tokenizer
from router.request import Logprobs, Piece, PromptLogprobs

# What OpenAI says for a token that cannot be; JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(piece: Piece, tokenizer: Tokenizer) -> dict[str, object]:
    """`bytes` is exact where `token`, a part of a character, cannot be."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    content = [
        {**entry(token_id, item.logprob), "top_logprobs": [entry(*likely) for likely in item.top]}
        for token_id, item in _pairs(piece)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(piece: Piece, tokenizer: Tokenizer, text_offset: Sequence[int]) -> dict[str, object]:
    """`text_offset` is where each token begins, in characters of the choice's text."""
    return {
        "tokens": [token_text(token_id, tokenizer) for token_id in piece.token_ids],
        "token_logprobs": [max(item.logprob, _LEAST) for item in piece.logprobs],
        "top_logprobs": [_top(token_id, item, tokenizer) for token_id, item in _pairs(piece)],
        "text_offset": list(text_offset),
    }


def prompt_logprobs(found: Sequence[PromptLogprobs], tokenizer: Tokenizer) -> list[object]:
    """As vLLM writes them: a null for the first token, then the likeliest tokens of each position by their ids."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}

    positions: list[object] = [None]
    for part in found:
        for token_id, item in zip(part.token_ids, part.entries, strict=True):
            likely = {str(other): entry(other, value, rank) for rank, (other, value) in enumerate(item.top, 1)}
            likely.setdefault(str(token_id), entry(token_id, item.logprob, item.rank))
            positions.append(likely)
    return positions


def echoed_logprobs(token_ids: Sequence[int], found: Sequence[PromptLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of the prompt in the form of completions; `text_offset` is left to the caller."""
    entries = [item for part in found for item in part.entries]
    pairs = list(zip(token_ids[1:], entries, strict=True))
    return {
        "tokens": [token_text(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [None, *(max(item.logprob, _LEAST) for item in entries)],
        "top_logprobs": [None, *(_top(token_id, item, tokenizer) for token_id, item in pairs)],
    }


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Text of a token; of a part of a character its bytes, as OpenAI writes them, so that no two are the same."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def num_characters(token_id: int, tokenizer: Tokenizer) -> int:
    """Characters that begin in a token: those bytes of it that do not continue one."""
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token_id))


def _top(token_id: int, item: Logprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest, and the chosen one if it is not among them; of two with one text the likelier stays."""
    top: dict[str, float] = {}
    for other, logprob in (*item.top, (token_id, item.logprob)):
        top.setdefault(token_text(other, tokenizer), max(logprob, _LEAST))
    return top


def _pairs(piece: Piece) -> Sequence[tuple[int, Logprobs]]:
    return list(zip(piece.token_ids, piece.logprobs, strict=True))

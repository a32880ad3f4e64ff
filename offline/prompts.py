"""Prompts and conversations as vLLM takes them, as the router's own."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.errors import InvalidArgument
from router.http.prompts import fields_of, messages_of
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt

PromptLike = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_SHAPES = 'must be a text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}'
_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def prompts_of(prompts: PromptLike | Sequence[PromptLike]) -> list[tuple[Prompt, str]]:
    """Each with its cache salt. Raises InvalidArgument."""
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, "prompts")]
    items = list(prompts)
    if items and all(_is_id(item) for item in items):
        return [_prompt(items, "prompts")]
    return [_prompt(item, f"prompts[{number}]") for number, item in enumerate(items)]


def conversations_of(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    add_generation_prompt: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[ChatPrompt]:
    """One conversation, or several. Raises InvalidArgument."""
    items: list[Any] = list(messages)
    if not items or isinstance(items[0], Mapping):
        items = [items]
    try:
        kwargs = json.dumps(chat_template_kwargs) if chat_template_kwargs else ""
    except (TypeError, ValueError):
        raise InvalidArgument("chat_template_kwargs", None, "must be what JSON can carry") from None
    prompts = []
    for number, conversation in enumerate(items):
        where = f"conversations[{number}]: " if len(items) > 1 else ""
        if isinstance(conversation, str | Mapping) or not all(isinstance(m, Mapping) for m in conversation):
            raise InvalidArgument(f"{where}messages", None, 'must be messages {"role": …, "content": …}')
        try:
            prompts.append(
                ChatPrompt(messages_of(conversation), add_generation_prompt, kwargs, fields_of(conversation))
            )
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}{error.field}", None, error.limit) from None
    return prompts


def _prompt(item: object, field: str) -> tuple[Prompt, str]:
    if isinstance(item, str):
        return TextPrompt(item), ""
    if isinstance(item, Mapping):
        if unknown := sorted(map(str, item.keys() - _KEYS)):
            raise InvalidArgument(f"{field}.{unknown[0]}", None, f"is not supported; a prompt {_SHAPES}")
        salt = item.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise InvalidArgument(f"{field}.cache_salt", salt, "must be a text")
        if item.get("prompt_token_ids") is not None:
            return _tokens(item["prompt_token_ids"], f"{field}.prompt_token_ids"), salt
        if isinstance(text := item.get("prompt"), str):
            return TextPrompt(text), salt
        raise InvalidArgument(field, None, _SHAPES)
    return _tokens(item, field), ""


def _tokens(ids: object, field: str) -> TokenPrompt:
    if not isinstance(ids, Sequence) and not hasattr(ids, "__array__"):
        raise InvalidArgument(field, None, _SHAPES)
    checked = []
    values: Any = ids
    for number, value in enumerate(values):
        if not _is_id(value) or value < 0:
            raise InvalidArgument(f"{field}[{number}]", value, "must be a token id")
        checked.append(int(value))
    return TokenPrompt(tuple(checked))


def _is_id(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)

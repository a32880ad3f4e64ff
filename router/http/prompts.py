"""Messages and prompts in all the forms in which OpenAI's API takes them, as the pipeline's own."""

import json
from collections.abc import Mapping, Sequence

from pagewire.errors import InvalidArgument
from router.request import Prompt, TextPrompt, TokenPrompt

MAX_PROMPTS = 128
_PLAIN_FIELDS = frozenset({"role", "content"})
# Go to the template as they are; `refusal` is what OpenAI's own answers have.
_TEMPLATE_FIELDS = frozenset({"name", "tool_call_id", "tool_calls", "reasoning_content"})
_DROPPED_FIELDS = frozenset({"refusal", "annotations", "audio", "function_call", "token_ids"})


def prompts_of(value: object, *, add_special_tokens: bool) -> list[Prompt]:
    """A text, token ids, or a list of texts or of token ids; raises InvalidArgument for anything else."""
    if isinstance(value, str):
        return [TextPrompt(value, add_special_tokens)]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("prompt", None, "must be a text, token ids, or a list of either, and not empty")
    if _is_id(value[0]):
        return [_tokens(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise InvalidArgument("prompt", None, f"has {len(value)} prompts, must have at most {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for number, item in enumerate(value):
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append(TextPrompt(item, add_special_tokens))
        elif isinstance(item, list) and isinstance(value[0], list):
            prompts.append(_tokens(item, f"prompt[{number}]"))
        else:
            raise InvalidArgument(f"prompt[{number}]", None, "must be a text or token ids, all prompts of one kind")
    return prompts


def messages_of(messages: Sequence[Mapping[str, object]]) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message; raises InvalidArgument for what is not text."""
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def fields_of(messages: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """The further fields of each message, as JSON; arguments of tool calls become objects, as templates want them."""
    found = []
    for number, message in enumerate(messages):
        fields = {name: message[name] for name in _TEMPLATE_FIELDS & message.keys() if message[name] is not None}
        if "tool_calls" in fields:
            fields["tool_calls"] = _tool_calls(fields["tool_calls"], f"messages[{number}].tool_calls")
        found.append(json.dumps(fields) if fields else "")
    return tuple(found)


def _tool_calls(calls: object, field: str) -> list[object]:
    if not isinstance(calls, list):
        raise InvalidArgument(field, None, "must be a list")
    found: list[object] = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgument(f"{field}[{number}].function", None, "must have a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                raise InvalidArgument(f"{field}[{number}].function.arguments", None, "must be JSON") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _message(message: Mapping[str, object], field: str) -> tuple[str, str]:
    for name, value in message.items():
        known = name in _PLAIN_FIELDS or name in _TEMPLATE_FIELDS
        if not known and (name not in _DROPPED_FIELDS or value) and value is not None and value != []:
            raise InvalidArgument(f"{field}.{name}", None, "is not supported")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidArgument(f"{field}.role", None, "must be a text")
    return role, _content(message.get("content"), role, f"{field}.content")


def _content(content: object, role: str, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidArgument(field, None, "must be a text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidArgument(
                f"{field}[{number}]", kind, 'must be {"type": "text", "text": …}; only text is served'
            )
        texts.append(text)
    return "\n".join(texts)  # as vLLM does


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(ids: list[object], field: str) -> TokenPrompt:
    checked = []
    for number, value in enumerate(ids):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgument(f"{field}[{number}]", value, "must be a token id")
        checked.append(value)
    return TokenPrompt(tuple(checked))

"""Every check of a client's request, before anything is started. Errors name the field, the value and the limit."""

import json
from collections.abc import Mapping

from pagewire.errors import InvalidArgument
from pagewire.wire import validate_sampling
from pagewire.worker_view import AdapterLabel
from router.adapters import resolve_adapter
from router.combinations import validate_combination
from router.model import ModelFacts
from router.request import ChatPrompt, GenerateCall, Prompt, TextOptions, TextPrompt

MAX_TEXT_BYTES = 4 << 20
MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_CACHE_SALT_BYTES = 256
MAX_REQUEST_ID_BYTES = 128
MAX_PRIORITY = (1 << 31) - 1
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_TOOLS_BYTES = 1 << 20
ANY_LENGTH = 1 << 31  # it will be truncated
_NO_ADAPTERS: Mapping[str, AdapterLabel] = {}
_RESERVED_KWARGS = frozenset({"messages", "add_generation_prompt"})


def validate_model(name: str, model: ModelFacts, adapters: Mapping[str, AdapterLabel] = _NO_ADAPTERS) -> None:
    """NotFound unless the name is empty, the served one or an adapter's."""
    resolve_adapter("", name, model.name, adapters)


def validate_call(
    call: GenerateCall,
    model: ModelFacts,
    *,
    max_model_len: int,
    adapters: Mapping[str, AdapterLabel] = _NO_ADAPTERS,
) -> None:
    """All that can be known before the prompt is tokenized."""
    resolve_adapter(call.adapter, call.model, model.name, adapters)
    _validate_truncation(call, max_model_len)
    validate_prompt(
        call.prompt, model, max_model_len=max_model_len if call.truncate_prompt_tokens is None else ANY_LENGTH
    )
    validate_sampling(call.sampling, vocab_size=model.vocab_size, max_model_len=max_model_len)
    _validate_text_options(call.text_options)
    validate_combination(call)
    if not -MAX_PRIORITY - 1 <= call.priority <= MAX_PRIORITY:
        raise InvalidArgument("priority", call.priority, f"must be in {-MAX_PRIORITY - 1} … {MAX_PRIORITY}")
    _check_bytes("cache_salt", call.cache_salt, MAX_CACHE_SALT_BYTES)
    _check_bytes("request_id", call.client_request_id, MAX_REQUEST_ID_BYTES)


def validate_prompt(prompt: Prompt | None, model: ModelFacts, *, max_model_len: int) -> None:
    """The prompt in whichever form it has."""
    if prompt is None:
        raise InvalidArgument("prompt", None, "is missing: set one of text, chat, tokens")
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidArgument("text", "", "must not be empty")
        _check_bytes("text", prompt.text, MAX_TEXT_BYTES)
    elif isinstance(prompt, ChatPrompt):
        _validate_chat(prompt, model)
    else:
        if not prompt.token_ids:
            raise InvalidArgument("tokens.token_ids", None, "must have at least one token id")
        validate_length("tokens.token_ids", len(prompt.token_ids), max_model_len)
        validate_token_ids("tokens.token_ids", prompt.token_ids, model)


def validate_length(field: str, num_tokens: int, max_model_len: int) -> None:
    """A prompt must leave room for one output token."""
    if num_tokens >= max_model_len:
        raise too_long(field, num_tokens, max_model_len)


class PromptTooLong(InvalidArgument):
    """A prompt that leaves no room for output; OpenAI's API has a code of its own for it."""


def too_long(field: str, num_tokens: int, max_model_len: int, *, is_exact: bool = True) -> PromptTooLong:
    """The error of a prompt that leaves no room."""
    limit = f"at most {max_model_len - 1} fit: the context length is {max_model_len} and one is for the output"
    at_least = "" if is_exact else "at least "
    return PromptTooLong(field, None, f"the prompt has {at_least}{num_tokens} tokens, {limit}")


def validate_token_ids(field: str, token_ids: tuple[int, ...], model: ModelFacts) -> None:
    """Each must be in the vocabulary."""
    if token_ids and max(token_ids) >= model.vocab_size:
        position, value = next((p, t) for p, t in enumerate(token_ids) if t >= model.vocab_size)
        raise InvalidArgument(f"{field}[{position}]", value, f"must be below the vocabulary size of {model.vocab_size}")


def resolve_max_tokens(max_tokens: int | None, *, num_prompt_tokens: int, max_model_len: int, fits: int) -> int:
    """The number of output tokens. Omitted: as many as the context and (`fits`) the workers' pools hold."""
    room = max_model_len - num_prompt_tokens
    if max_tokens is None:
        return max(1, min(room, fits))
    if max_tokens > room:
        limit = (
            f"must be at most {room}: the prompt has {num_prompt_tokens} tokens, the context length is {max_model_len}"
        )
        raise InvalidArgument("sampling.max_tokens", max_tokens, limit)
    return max_tokens


def truncated(
    token_ids: tuple[int, ...], truncate_prompt_tokens: int | None, max_tokens: int | None, max_model_len: int
) -> tuple[int, ...]:
    """The prompt's last tokens, as many as asked for (-1: as leave room for the output)."""
    if truncate_prompt_tokens is None:
        return token_ids
    most = max_model_len - (max_tokens or 1) if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    return token_ids[-max(1, most) :]


def template_variables(prompt: ChatPrompt) -> dict[str, object]:
    """`template_kwargs_json` as a dict."""
    if not prompt.template_kwargs_json:
        return {}
    field = "chat.template_kwargs_json"
    _check_bytes(field, prompt.template_kwargs_json, MAX_TEMPLATE_KWARGS_BYTES)
    try:
        variables = json.loads(prompt.template_kwargs_json)
    except (ValueError, RecursionError):
        raise InvalidArgument(field, prompt.template_kwargs_json, "must be a JSON object") from None
    if not isinstance(variables, dict):
        raise InvalidArgument(field, prompt.template_kwargs_json, "must be a JSON object")
    if reserved := sorted(_RESERVED_KWARGS & variables.keys()):
        raise InvalidArgument(field, reserved[0], "is set by the router and cannot be given")
    return variables


def message_fields(prompt: ChatPrompt) -> list[dict[str, object]]:
    """The further fields of each message."""
    given = [*prompt.message_fields, *[""] * (len(prompt.messages) - len(prompt.message_fields))]
    found = []
    for number, text in enumerate(given):
        value = _json(f"chat.messages[{number}].fields_json", text, {})
        if not isinstance(value, dict):
            raise InvalidArgument(f"chat.messages[{number}].fields_json", None, "must be a JSON object")
        if taken := sorted({"role", "content"} & value.keys()):
            raise InvalidArgument(f"chat.messages[{number}].fields_json", taken[0], "is a field of its own")
        found.append(value)
    return found


def tools_of(prompt: ChatPrompt) -> list[object]:
    """`tools_json` as a list."""
    value = _json("chat.tools_json", prompt.tools_json, [])
    if not isinstance(value, list):
        raise InvalidArgument("chat.tools_json", None, "must be a JSON array")
    return value


def _json(field: str, text: str, default: object) -> object:
    if not text:
        return default
    _check_bytes(field, text, MAX_TOOLS_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(field, None, "must be JSON") from None


def _validate_truncation(call: GenerateCall, max_model_len: int) -> None:
    wanted = call.truncate_prompt_tokens
    if wanted is not None and wanted != -1 and not 1 <= wanted < max_model_len:
        limit = f"must be in 1 … {max_model_len - 1}, or -1 for as many as fit"
        raise InvalidArgument("truncate_prompt_tokens", wanted, limit)


def _validate_chat(prompt: ChatPrompt, model: ModelFacts) -> None:
    if model.tokenizer.chat_template is None:
        raise InvalidArgument("chat", None, f"model {model.name!r} has no chat template; use text or tokens")
    if not prompt.messages:
        raise InvalidArgument("chat.messages", None, "must have at least one message")
    if len(prompt.messages) > MAX_MESSAGES:
        raise InvalidArgument("chat.messages", len(prompt.messages), f"must be at most {MAX_MESSAGES} messages")
    size = 0
    for number, (role, content) in enumerate(prompt.messages):
        if not 1 <= len(role) <= MAX_ROLE_CHARS:
            field = f"chat.messages[{number}].role"
            raise InvalidArgument(field, role, f"must have 1 … {MAX_ROLE_CHARS} characters")
        size += len(content.encode())
    if size > MAX_TEXT_BYTES:
        raise InvalidArgument("chat.messages", None, f"have {size} bytes of text, must be at most {MAX_TEXT_BYTES}")
    template_variables(prompt)
    if len(prompt.message_fields) > len(prompt.messages):
        raise InvalidArgument("chat.messages", None, "have fewer entries than their further fields")
    message_fields(prompt)
    tools_of(prompt)


def _validate_text_options(options: TextOptions) -> None:
    _validate_bad_words(options.bad_words)
    field = "text_options.stop"
    if len(options.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(field, len(options.stop), f"must be at most {MAX_STOP_STRINGS} strings")
    for number, stop in enumerate(options.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            shown = stop or None
            limit = f"has {len(stop)} characters, must have 1 … {MAX_STOP_CHARS}"
            raise InvalidArgument(f"{field}[{number}]", shown, limit)


def _validate_bad_words(words: tuple[str, ...]) -> None:
    field = "text_options.bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument(field, len(words), f"must be at most {MAX_BAD_WORDS} texts")
    for number, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS or not word.strip():
            limit = f"has {len(word)} characters, must have 1 … {MAX_BAD_WORD_CHARS}, not only spaces"
            raise InvalidArgument(f"{field}[{number}]", word if len(word) <= MAX_BAD_WORD_CHARS else None, limit)


def _check_bytes(field: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(field, None, "must be Unicode text; it has a lone surrogate") from None
    if size > limit:
        raise InvalidArgument(field, None, f"has {size} bytes, must be at most {limit}")

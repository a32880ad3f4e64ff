"""Parameters that clients know and this router does not obey: refused by name, unless their value asks for nothing."""

from collections.abc import Mapping

from pagewire.errors import InvalidArgument

# They change no output: hints, and bookkeeping of OpenAI's own service.
_IGNORED = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip

_NO_FUNCTIONS = "is not supported; tools are its newer name"
_TEMPLATE = "is not supported; variables of the chat template go into chat_template_kwargs"
_UNSUPPORTED = "is not supported"

# Name -> (values that ask for nothing, why any other is refused). A null always asks for nothing.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "functions": (([],), _NO_FUNCTIONS),
    "function_call": (("none", "auto"), _NO_FUNCTIONS),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), _UNSUPPORTED),
    "web_search_options": ((), _UNSUPPORTED),
    "reasoning_effort": ((), _TEMPLATE),
    "verbosity": ((), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "chat_template": ((), "is not supported; the model's own is used"),
    "continue_final_message": ((False,), _UNSUPPORTED),
    "suffix": (("",), _UNSUPPORTED),
    "prompt_embeds": ((), _UNSUPPORTED),
    "spaces_between_special_tokens": ((True,), _UNSUPPORTED),
    "return_tokens_as_token_ids": ((False,), _UNSUPPORTED),
    "logits_processors": (([],), _UNSUPPORTED),
    "mm_processor_kwargs": (({},), _UNSUPPORTED),
    "kv_transfer_params": (({},), _UNSUPPORTED),
}


def supported(body: Mapping[str, object]) -> dict[str, object]:
    """The body without nulls and without what asks for nothing; raises InvalidArgument for what cannot be had."""
    kept = {}
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name not in _REFUSED:
            kept[name] = value
            continue
        neutral, reason = _REFUSED[name]
        if value not in neutral:
            raise InvalidArgument(name, None, reason)
    return kept

"""Requests to the public API from plain arguments; what protobuf cannot carry is refused by name before it is sent."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.v1 import inference_pb2
from pagewire.wire import sampling_to_proto

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_BEAM_STOPS = {True: inference_pb2.BEAM_STOP_FIRST, False: inference_pb2.BEAM_STOP_UNLIKELY,
               "never": inference_pb2.BEAM_STOP_NEVER}  # fmt: skip


def build_generate_request(
    prompt: Prompt | None = None,
    *,
    chat: Messages | None = None,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    model: str = "",
    stop: Sequence[str] = (),
    include_stop_str_in_output: bool = False,
    skip_special_tokens: bool = True,
    bad_words: Sequence[str] = (),
    truncate_prompt_tokens: int | None = None,
    best_of: int | None = None,
    num_beams: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    tools: Sequence[Mapping[str, Any]] = (),
    cache_salt: str = "",
    priority: int = 0,
    request_id: str = "",
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """The request for text, token ids or chat messages ({"role": …, "content": …}; further keys go to the template).

    `add_generation_prompt`, `chat_template_kwargs` (variables of the template) and `tools` are for messages.
    `sampling` takes SamplingParams' fields. With `num_beams` it is a beam search, `early_stopping` as in Hugging Face's
    `generate`. Raises InvalidArgument for what protobuf cannot carry.
    """
    if (prompt is None) == (chat is None):
        raise InvalidArgument("prompt", None, "exactly one of a prompt and chat messages must be given")
    try:
        params = SamplingParams(**sampling)
    except TypeError:
        unknown = sorted(sampling.keys() - set(SamplingParams.__dataclass_fields__))
        raise InvalidArgument("sampling", unknown, "no such sampling parameter") from None
    try:
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=sampling_to_proto(params),
            text_options=inference_pb2.TextOptions(
                stop=[stop] if isinstance(stop, str) else stop,
                include_stop_str_in_output=include_stop_str_in_output,
                skip_special_tokens=skip_special_tokens,
                bad_words=[bad_words] if isinstance(bad_words, str) else bad_words,
            ),
            truncate_prompt_tokens=truncate_prompt_tokens,
            best_of=best_of,
            cache_salt=cache_salt,
            priority=priority,
            request_id=request_id,
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument("request", None, str(error)) from None
    if num_beams is not None:
        _set_beams(request, num_beams, length_penalty, early_stopping)
    _set_prompt(request, prompt, _chat(chat, add_generation_prompt, chat_template_kwargs, tools))
    return request


def _chat(
    chat: Messages | None,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
) -> inference_pb2.ChatPrompt | None:
    if chat is None:
        if tools:
            raise InvalidArgument("tools", None, "are only for chat messages")
        return None
    try:
        messages = [
            inference_pb2.ChatMessage(role=m["role"], content=m["content"], fields_json=_other_fields(m)) for m in chat
        ]
    except (KeyError, TypeError, ValueError):
        limit = 'must be messages {"role": …, "content": …} of valid Unicode'
        raise InvalidArgument("chat.messages", None, limit) from None
    try:
        template_kwargs_json = json.dumps(template_kwargs) if template_kwargs else ""
    except (TypeError, ValueError):
        raise InvalidArgument("chat_template_kwargs", template_kwargs, "must be what JSON can carry") from None
    try:
        tools_json = json.dumps(list(tools)) if tools else ""
    except (TypeError, ValueError):
        raise InvalidArgument("tools", None, "must be what JSON can carry") from None
    return inference_pb2.ChatPrompt(
        messages=messages,
        # False is said, True is the default.
        add_generation_prompt=None if add_generation_prompt else False,
        template_kwargs_json=template_kwargs_json,
        tools_json=tools_json,
    )


def _set_beams(
    request: inference_pb2.GenerateRequest, num_beams: int, length_penalty: float, early_stopping: bool | str
) -> None:
    if early_stopping not in _BEAM_STOPS:
        raise InvalidArgument("early_stopping", early_stopping, 'must be True, False or "never"')
    try:
        request.beam_search.num_beams = num_beams
        request.beam_search.length_penalty = length_penalty
    except (TypeError, ValueError):
        raise InvalidArgument("num_beams", num_beams, "must be a whole number, length_penalty a number") from None
    request.beam_search.early_stopping = _BEAM_STOPS[early_stopping]


def _set_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    prompt: Prompt | None,
    chat: inference_pb2.ChatPrompt | None,
) -> None:
    if chat is not None:
        request.chat.CopyFrom(chat)
    elif isinstance(prompt, str):
        try:
            request.text = prompt
        except ValueError:
            raise InvalidArgument("text", None, "must be valid Unicode (it has lone surrogates)") from None
    elif isinstance(request, inference_pb2.GenerateRequest):
        try:
            request.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=prompt or ()))
        except (TypeError, ValueError):
            limit = "must be whole numbers in 0 … 2**32-1"
            raise InvalidArgument("tokens.token_ids", list(prompt or ()), limit) from None


def _other_fields(message: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    return json.dumps(fields) if fields else ""


def build_tokenize_request(
    prompt: str | None,
    chat: Messages | None,
    model: str,
    add_special_tokens: bool,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> inference_pb2.TokenizeRequest:
    """The request for text or chat messages."""
    if (prompt is None) == (chat is None):
        raise InvalidArgument("prompt", None, "exactly one of a prompt and chat messages must be given")
    request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    _set_prompt(request, prompt, _chat(chat, add_generation_prompt, chat_template_kwargs, tools))
    return request


def build_detokenize_request(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """The request for token ids."""
    request = inference_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    try:
        request.token_ids.extend(token_ids)
    except (TypeError, ValueError):
        raise InvalidArgument("token_ids", list(token_ids), "must be whole numbers in 0 … 2**32-1") from None
    return request

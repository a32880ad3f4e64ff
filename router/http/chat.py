"""POST /v1/chat/completions."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer
from router.backend import Backend
from router.http.answer import FINISH, Answer
from router.http.body import parse, read_json
from router.http.calls import call_of, request_id_of
from router.http.chat_parser import CallDelta, ChatParser, Delta
from router.http.logprobs import chat_logprobs, prompt_logprobs
from router.http.prompts import fields_of, messages_of
from router.http.requests import ChatRequest
from router.http.responses import Json
from router.http.tool_formats import (
    ToolFormat,
    check_tools,
    demanded,
    has_reasoning,
    prompt_opens_thought,
    tool_format_of,
)
from router.http.unsupported import supported
from router.request import ChatPrompt, Piece, PromptLogprobs


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A choice is a message, or in a stream what was added to it."""

    tokenizer: Tokenizer
    new_parser: Callable[[], ChatParser]
    return_token_ids: bool = False
    show_prompt_logprobs: bool = False
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _parsers: dict[int, ChatParser] = field(default_factory=dict)
    _prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def prompt(self, number: int, found: PromptLogprobs) -> None:
        self._prompt_logprobs.append(found)

    def fields(self) -> Json:
        if not self.show_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._prompt_logprobs, self.tokenizer)}

    def openings(self, number: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunk(self, number: int, piece: Piece) -> Json | None:
        parser, added = self._parse(number, piece)
        if added.is_empty and piece.finish_reason is None and not (piece.logprobs or self.return_token_ids):
            return None
        delta: Json = {}
        if added.reasoning:
            delta["reasoning_content"] = added.reasoning
        if added.content:
            delta["content"] = added.content
        if added.calls:
            delta["tool_calls"] = [_call_delta(call) for call in added.calls]
        return {"index": number, "delta": delta, **self._rest(piece, parser)}

    def whole(self, number: int, piece: Piece) -> Json:
        parser, added = self._parse(number, piece)
        calls = _joined(added.calls)
        content = None if calls and not added.content else added.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if added.reasoning:
            message["reasoning_content"] = added.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"index": number, "message": message, **self._rest(piece, parser)}

    def _parse(self, number: int, piece: Piece) -> tuple[ChatParser, Delta]:
        parser = self._parsers.get(number)
        if parser is None:
            parser = self._parsers[number] = self.new_parser()
        added = parser.push(piece.text)
        if piece.finish_reason is not None:
            last = parser.finish()
            added = Delta(added.reasoning + last.reasoning, added.content + last.content, added.calls + last.calls)
        return parser, added

    def _rest(self, piece: Piece, parser: ChatParser) -> Json:
        finish = None if piece.finish_reason is None else FINISH[piece.finish_reason]
        return {
            "logprobs": chat_logprobs(piece, self.tokenizer) if piece.logprobs else None,
            "finish_reason": "tool_calls" if finish == "stop" and parser.num_calls else finish,
            "stop_reason": piece.stop_reason or None,
            **({"token_ids": piece.token_ids} if self.return_token_ids else {}),
        }


class ChatCompletions:
    """The endpoint."""

    def __init__(self, pipeline: Backend) -> None:
        self._pipeline = pipeline
        tokenizer = pipeline.model.tokenizer
        self._tool_format = tool_format_of(tokenizer)
        self._has_reasoning = has_reasoning(tokenizer)
        self._opens_thought = prompt_opens_thought(tokenizer)

    async def __call__(self, request: Request) -> ASGIApp:
        return (await self.answer(await read_json(request), request.headers)).response()

    async def answer(self, body: Mapping[str, object], headers: Mapping[str, str]) -> Answer:
        """What the request is answered with, not begun yet. Raises PagewireError."""
        asked = parse(ChatRequest, supported(body))
        style, sampling = self._tools(asked, asked.chat_sampling())
        prompt = ChatPrompt(
            messages_of(asked.messages),
            asked.add_generation_prompt,
            asked.template_kwargs_json(),
            fields_of(asked.messages),
            json.dumps(asked.tools) if style is not None else "",
        )
        request_id = request_id_of(asked, headers)
        call = call_of(asked, prompt, sampling, request_id, headers, beam_width=asked.n)
        if style == "mistral":  # its tag is a special token
            call = replace(call, text_options=replace(call.text_options, skip_special_tokens=False))
        extra: Json = {}
        if asked.return_token_ids:
            extra["prompt_token_ids"] = await self._pipeline.tokenize(
                prompt,
                truncate_prompt_tokens=asked.truncate_prompt_tokens,
                max_tokens=sampling.max_tokens,
                tenant=call.tenant or call.cache_salt,
            )
        reasoning = self._has_reasoning and asked.include_reasoning
        # Whose text has a form has no thoughts, unless they are part of it.
        in_thought = self._opens_thought and asked.add_generation_prompt and sampling.structured_output is None
        form = ChatForm(
            self._pipeline.model.tokenizer,
            lambda: ChatParser(style, reasoning=reasoning, in_thought=in_thought),
            asked.return_token_ids,
            asked.prompt_logprobs is not None,
        )
        return Answer(
            self._pipeline,
            f"chatcmpl-{request_id}",
            (call,),
            form,
            asked.include_usage,
            extra,
            asked.stream,
            # A demanded call is a form too.
            structure_name=asked.structure_name or "tools",
        )

    def _tools(self, asked: ChatRequest, sampling: SamplingParams) -> tuple[ToolFormat | None, SamplingParams]:
        """How calls are written, None if there are none; a choice that demands a call becomes a grammar."""
        names, choice = check_tools(asked.tools), asked.tool_choice or ("auto" if asked.tools else "none")
        only = _named(choice)
        if only is None and choice not in ("none", "auto", "required"):
            limit = 'must be none, auto, required or {"type": "function", "function": {"name": …}}'
            raise InvalidArgument("tool_choice", None, limit)
        if only is not None and only not in names:
            raise InvalidArgument("tool_choice", only, "is none of the tools")
        if choice == "required" and not names:
            raise InvalidArgument("tool_choice", choice, "needs tools")
        if not names or choice == "none":
            return None, sampling
        if self._tool_format is None:
            raise InvalidArgument("tools", None, f"are not known to the chat template of {self._pipeline.model.name!r}")
        if choice == "auto":
            return self._tool_format, sampling
        if sampling.structured_output is not None:
            raise InvalidArgument(
                "tool_choice", None, "that demands a call is not supported together with a form of the text"
            )
        structure = demanded(self._tool_format, asked.tools, only=only, parallel=asked.parallel_tool_calls)
        return self._tool_format, replace(sampling, structured_output=structure)


def _named(choice: object) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _call_delta(call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call.name, call.arguments)}


def _joined(deltas: list[CallDelta]) -> list[Json]:
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    for delta in deltas:
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        if delta.name is not None:
            names[delta.index] = delta.name
    return [_call(names[index], arguments[index]) for index in sorted(names)]


def _call(name: str, arguments: str) -> Json:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}

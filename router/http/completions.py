"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer
from router.backend import Backend
from router.http.answer import FINISH, Answer
from router.http.body import parse, read_json
from router.http.calls import call_of, request_id_of
from router.http.logprobs import completion_logprobs, echoed_logprobs, num_characters, prompt_logprobs
from router.http.prompts import prompts_of
from router.http.requests import COMPLETION_MAX_TOKENS, CompletionRequest
from router.http.responses import Json
from router.http.unsupported import supported
from router.request import Piece, Prompt, PromptLogprobs, TextPrompt, TokenPrompt
from router.service import MAX_LABEL_LENGTH


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """A choice is a text. `echoes` and `prompt_token_ids` are by prompt, each of which has `num_choices`."""

    tokenizer: Tokenizer
    num_choices: int
    echoes: Sequence[str] = ()
    prompt_token_ids: Sequence[Sequence[int]] = ()
    return_token_ids: bool = False
    # Tokens that are no text.
    hidden: frozenset[int] = frozenset()
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    # Only the prompt is wanted: what was drawn is not shown.
    only_prompt: bool = False
    # By prompt, which must all be token ids then.
    show_prompt_logprobs: bool = False
    echo_logprobs: bool = False
    # Where the next token of each choice begins in its text.
    _offsets: dict[int, int] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[PromptLogprobs]] = field(default_factory=dict)

    def fields(self) -> Json:
        return {}

    def prompt(self, number: int, found: PromptLogprobs) -> None:
        self._prompt_logprobs.setdefault(number // self.num_choices, []).append(found)

    def openings(self, number: int) -> list[Json]:
        echoed = self._echoed(number) or None
        choice: Json = {"index": number, "text": self._echo(number), "logprobs": echoed, "finish_reason": None}
        if self.return_token_ids:
            choice["prompt_token_ids"] = self.prompt_token_ids[number // self.num_choices]
        return [choice] if self.echoes or self.return_token_ids else []

    def chunk(self, number: int, piece: Piece) -> Json | None:
        if self.only_prompt:
            piece = Piece(piece.choice, 0, finish_reason=piece.finish_reason)
        return {"index": number, "text": piece.text, **self._rest(number, piece)}

    def whole(self, number: int, piece: Piece) -> Json:
        if self.only_prompt:
            piece = Piece(piece.choice, 0, finish_reason=piece.finish_reason)
        echoed = self._echoed(number)
        choice = {"index": number, "text": self._echo(number) + piece.text, **self._rest(number, piece)}
        if echoed:
            own: Any = choice["logprobs"] or {}
            choice["logprobs"] = {name: [*values, *own.get(name, [])] for name, values in echoed.items()}
        if self.return_token_ids:
            choice["prompt_token_ids"] = self.prompt_token_ids[number // self.num_choices]
        if self.show_prompt_logprobs:
            found = self._prompt_logprobs.get(number // self.num_choices, [])
            choice["prompt_logprobs"] = prompt_logprobs(found, self.tokenizer)
        return choice

    def _echoed(self, number: int) -> dict[str, Any]:
        """The prompt's log-probabilities; those of the choice begin behind its text."""
        if not self.echo_logprobs:
            return {}
        at = number // self.num_choices
        token_ids = self.prompt_token_ids[at]
        widths = [0 if t in self.hidden else num_characters(t, self.tokenizer) for t in token_ids]
        *offsets, end = accumulate(widths, initial=0)
        self._offsets[number] = end
        return {**echoed_logprobs(token_ids, self._prompt_logprobs.get(at, []), self.tokenizer), "text_offset": offsets}

    def _echo(self, number: int) -> str:
        return self.echoes[number // self.num_choices] if self.echoes else ""

    def _rest(self, number: int, piece: Piece) -> Json:
        logprobs = None
        if piece.logprobs:
            widths = [0 if t in self.hidden else num_characters(t, self.tokenizer) for t in piece.token_ids]
            *offsets, end = accumulate(widths, initial=self._offsets.get(number, 0))
            self._offsets[number] = end
            logprobs = completion_logprobs(piece, self.tokenizer, offsets)
        return {
            "logprobs": logprobs,
            "finish_reason": None if piece.finish_reason is None else FINISH[piece.finish_reason],
            "stop_reason": piece.stop_reason or None,
            **({"token_ids": piece.token_ids} if self.return_token_ids else {}),
        }


class Completions:
    """The endpoint."""

    def __init__(self, pipeline: Backend) -> None:
        self._pipeline = pipeline

    async def __call__(self, request: Request) -> ASGIApp:
        return (await self.answer(await read_json(request), request.headers)).response()

    async def answer(self, body: Mapping[str, object], headers: Mapping[str, str]) -> Answer:
        """What the request is answered with, not begun yet. Raises PagewireError."""
        asked = parse(CompletionRequest, supported(body))
        prompts = prompts_of(asked.prompt, add_special_tokens=asked.add_special_tokens)
        echo_logprobs = asked.echo and asked.logprobs is not None
        is_cut = asked.truncate_prompt_tokens is not None
        tenant = headers.get("x-tenant", "")[:MAX_LABEL_LENGTH] or asked.cache_salt
        echoes = [await self._echo(prompt, asked, tenant) for prompt in prompts] if asked.echo and not is_cut else []
        if asked.max_tokens is None or asked.return_token_ids or echo_logprobs or is_cut:
            # Tokenized here, since the length matters, or is to be shown; the pipeline need not do it again.
            prompts = [TokenPrompt(await self._tokenize(prompt, asked, tenant)) for prompt in prompts]
        if asked.echo and is_cut:
            echoes = [await self._echo(prompt, asked, tenant) for prompt in prompts]
        request_id = request_id_of(asked, headers)
        calls = [
            call_of(
                asked,
                prompt,
                self._sampling(asked, prompt),
                request_id,
                headers,
                best_of=asked.drawn,
                beam_width=asked.best_of or asked.n,
            )
            for prompt in prompts
        ]
        tokenizer = self._pipeline.model.tokenizer
        form = CompletionForm(
            tokenizer,
            asked.n,
            echoes,
            [prompt.token_ids for prompt in prompts if isinstance(prompt, TokenPrompt)],
            asked.return_token_ids,
            tokenizer.special_token_ids if asked.skip_special_tokens else frozenset(),
            only_prompt=asked.only_prompt,
            show_prompt_logprobs=asked.prompt_logprobs is not None,
            echo_logprobs=echo_logprobs,
        )
        return Answer(
            self._pipeline,
            f"cmpl-{request_id}",
            calls,
            form,
            asked.include_usage,
            is_stream=asked.stream,
            structure_name=asked.structure_name,
            only_prompt=asked.only_prompt,
        )

    def _sampling(self, asked: CompletionRequest, prompt: Prompt) -> SamplingParams:
        """Without max_tokens OpenAI's default holds, or what the context has room for."""
        num_tokens = len(prompt.token_ids) if isinstance(prompt, TokenPrompt) else 0
        room = self._pipeline.max_model_len - num_tokens
        return asked.completion_sampling(default_max_tokens=max(1, min(COMPLETION_MAX_TOKENS, room)))

    async def _tokenize(self, prompt: Prompt, asked: CompletionRequest, tenant: str) -> tuple[int, ...]:
        return await self._pipeline.tokenize(
            prompt, truncate_prompt_tokens=asked.truncate_prompt_tokens, max_tokens=asked.max_tokens, tenant=tenant
        )

    async def _echo(self, prompt: Prompt, asked: CompletionRequest, tenant: str) -> str:
        """The prompt's text: as it was given, or that of its tokens (checked first)."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        token_ids = await self._pipeline.tokenize(prompt, tenant=tenant)
        return await self._pipeline.detokenize(token_ids, skip_special_tokens=asked.skip_special_tokens)

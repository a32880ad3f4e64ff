"""What clients may send, field by field: OpenAI's names, and vLLM's for what OpenAI does not have."""

import json
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.wire import MAX_LOGPROBS
from router.http.structures import structure_of
from router.request import BeamSearch, TextOptions

# OpenAI's default for completions; chats may go on as long as they fit.
COMPLETION_MAX_TOKENS = 16


class _Strict(BaseModel):
    """No field is guessed, none is dropped in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[str], BeforeValidator(_as_list)]


class StreamOptions(_Strict):
    """`include_obfuscation` pads OpenAI's own streams; here nothing is padded."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationRequest(_Strict):
    """What both endpoints have in common. Ranges are checked by the pipeline, as for gRPC."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: dict[str, float] = {}
    stop: Stops = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    bad_words: list[str] = []
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool = False
    num_beams: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: str = ""
    return_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        """A stream ends with a chunk that has the usage."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", None, "is only allowed with stream = true")
        return self.stream_options is not None and self.stream_options.include_usage

    def text_options(self) -> TextOptions:
        """As the pipeline takes them."""
        return TextOptions(
            tuple(self.stop), self.include_stop_str_in_output, self.skip_special_tokens, tuple(self.bad_words)
        )

    def beam_search(self, width: int) -> BeamSearch | None:
        """As the pipeline takes it. `num_beams` asks for a search by itself; without it there are `width` beams."""
        if not self.wants_beams:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidArgument(name, getattr(self, name), "is only for beam search: set use_beam_search")
            return None
        early = None if self.early_stopping == "never" else bool(self.early_stopping)
        return BeamSearch(width if self.num_beams is None else self.num_beams, self.length_penalty, early)

    @property
    def wants_beams(self) -> bool:
        """A beam search was asked for."""
        return self.use_beam_search or self.num_beams is not None

    @property
    def structure_name(self) -> str:
        """The field that asks for a form of the text; empty if none does."""
        names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        default = "" if self.response_format is None else "response_format"
        return next((name for name in names if getattr(self, name)), default)

    def structured_output(self) -> StructuredOutput | None:
        """In whichever way it was asked for; raises InvalidArgument for two ways at once."""
        return structure_of(
            self.response_format,
            self.structured_outputs,
            {"guided_json": self.guided_json, "guided_regex": self.guided_regex, "guided_choice": self.guided_choice,
             "guided_grammar": self.guided_grammar},
        )  # fmt: skip

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the pipeline takes them; not checked yet."""
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's older name for "all"
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            # OpenAI's seeds are signed.
            seed=None if self.seed is None else self.seed % 2**64,
            logit_bias=MappingProxyType(_logit_bias(self.logit_bias)),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            structured_output=self.structured_output(),
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = ""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    def chat_sampling(self) -> SamplingParams:
        """Raises InvalidArgument where two fields contradict each other."""
        if self.add_special_tokens:
            raise InvalidArgument("add_special_tokens", True, "must be false: the chat template writes them")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidArgument("prompt_logprobs", self.prompt_logprobs, "is not supported together with stream")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", self.top_logprobs, "is only allowed with logprobs = true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            limit = "must not differ from max_tokens, its older name"
            raise InvalidArgument("max_completion_tokens", self.max_completion_tokens, limit)
        return self.sampling(max_tokens=next(iter(limits), None), logprobs=self.top_logprobs if self.logprobs else None)

    def template_kwargs_json(self) -> str:
        """As the pipeline takes it."""
        return json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else ""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def completion_sampling(self, *, default_max_tokens: int) -> SamplingParams:
        """Raises InvalidArgument for what is not served."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidArgument("prompt_logprobs", self.prompt_logprobs, "is not supported together with stream")
        max_tokens = max(default_max_tokens, self.min_tokens) if self.max_tokens is None else self.max_tokens
        sampling = self.sampling(max_tokens=1 if self.only_prompt else max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=self.logprobs)
        return sampling

    @property
    def only_prompt(self) -> bool:
        """The prompt itself is wanted, with its log-probabilities."""
        return self.echo and self.max_tokens == 0

    @property
    def drawn(self) -> int | None:
        """best_of as the pipeline takes it."""
        return None if self.wants_beams or self.best_of == self.n else self.best_of


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if re.fullmatch(r"[0-9]{1,10}", key) is None:
            raise InvalidArgument("logit_bias", key, "must map token ids, as strings, to numbers")
    return {int(key): bias for key, bias in given.items()}

"""A request and its output as plain data: what the servicer hands to the pipeline and gets back. No protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pagewire.sampling import SamplingParams
from pagewire.worker_view import AdapterLabel, PrefixSource
from router.prompt_keys import PromptKeys


class FinishReason(Enum):
    """Why a choice ended; the values are those of the protobuf enum."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages (role, content) for the model's template; `template_kwargs_json` is a JSON object or empty.

    `message_fields` has further fields of each message (tool_calls, name, …), a JSON object or empty; it may be shorter
    than `messages`. `tools_json` is a JSON array or empty.
    """

    messages: tuple[tuple[str, str], ...]
    add_generation_prompt: bool = True
    template_kwargs_json: str = ""
    message_fields: tuple[str, ...] = ()
    tools_json: str = ""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output text is made."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """As Hugging Face's `generate`; `early_stopping` True: at once, False: by the best beam, None: "never" too soon."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What the client asked for, before validation.

    `truncate_prompt_tokens` keeps the prompt's last tokens, -1 as many as leave room for max_tokens. `best_of` choices
    are drawn and the best n returned.
    """

    prompt: Prompt | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    text_options: TextOptions = field(default_factory=TextOptions)
    model: str = ""
    cache_salt: str = ""
    priority: int = 0
    adapter: str = ""
    client_request_id: str = ""
    tenant: str = ""
    traceparent: str = ""
    session_id: str = ""
    truncate_prompt_tokens: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One attempt at a worker, token ids only; `request_id` is unique per attempt.

    `choices` (number -> output token ids so far, finished) is empty for a fresh request. `seconds_left` is what
    a worker is told of the deadline.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""
    seconds_left: float | None = None
    choices: Mapping[int, "ChoiceSoFar"] = field(default_factory=dict)
    prefix_sources: tuple[PrefixSource, ...] = ()
    num_expected_tokens: int = 0
    adapter: AdapterLabel | None = None
    # For placing it; workers are not told.
    keys: PromptKeys | None = None
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What a choice has produced; its tokens are facts."""

    output_token_ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class TransferSource:
    """Where a decode worker finds the prompt's KV."""

    endpoint: str
    worker_id: str
    incarnation: int
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one output token; `top` is (token id, logprob), best first; `rank` 1 = likeliest."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Token:
    """One sampled token; `index` is its absolute output position. Not frozen: that would make it thrice as dear."""

    choice: int
    index: int
    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's `token_ids` from position `start` on; comes before any piece."""

    start: int
    token_ids: tuple[int, ...]
    entries: tuple[Logprobs, ...]


@dataclass(slots=True)
class Piece:
    """New output of one choice, `index` being the position of its first token."""

    choice: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    beam_score: float | None = None

    def extend(self, later: "Piece") -> None:
        """Takes up the piece that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a request: counts, milliseconds since its arrival, and who worked for it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_ms: float
    ttft_ms: float
    total_ms: float
    prefill_worker: str
    decode_worker: str

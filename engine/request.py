"""What goes into the engine and what comes out of it: plain data, no torch, no protobuf, no text."""

from dataclasses import dataclass, field
from enum import Enum

from kvstore.hashing import adapter_key
from kvstore.kv_groups import HeldBlocks
from pagewire.grammar import Grammar
from pagewire.sampling import SamplingParams


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """What a choice has produced so far; its tokens are facts and are never sampled again."""

    choice: int
    output_token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class AdoptedKv:
    """KV that a transfer put into this engine's pool. The references on `block_ids` pass to the engine.

    `block_ids` are in sequence order and cover `num_tokens` tokens; the last block may be partial. They are those of KV
    group 0 from block number `first_block` on, `others` are the other groups': each has what the next token sees.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    first_block: int = 0
    others: tuple[HeldBlocks, ...] = ()

    @property
    def all_block_ids(self) -> list[int]:
        """In every group."""
        return [*self.block_ids, *(block_id for held in self.others for block_id in held.block_ids)]


@dataclass(frozen=True, slots=True)
class AdapterId:
    """One load of an adapter. `digest` is its content's SHA-256, `generation` the load's number.

    `key` is what block keys have of it: KV of two adapters, or of two loads of one, never mixes. `weights` is for the
    runner (`engine.lora.adapter.Adapter`); whoever holds it keeps an adapter alive that has been unloaded meanwhile.
    """

    name: str
    digest: bytes
    generation: int
    weights: object = field(default=None, compare=False, repr=False)
    key: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", adapter_key(self.digest, self.generation))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request, token ids only.

    `choices` is empty for a fresh request; then the prompt is prefilled once and forked into `params.n` sequences.
    `prefill_only` ends the request after the first token of each choice and hands its blocks out as `HeldKv`;
    all its blocks are reserved at admission, so that it is never preempted. `tenant` is whom it counts against in fair
    order; `trace_id` is for log lines. `ids_are_checked`: the service has looked at all token ids, once is enough.
    `grammar` is the compiled `params.structured_output`. `adapter` must be loaded (`AdapterStore.find`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    choices: tuple[ChoiceState, ...] = ()
    prefill_only: bool = False
    adopted: AdoptedKv | None = None
    priority: int = 0
    tenant: str = ""
    trace_id: str = ""
    ids_are_checked: bool = False
    grammar: Grammar | None = None
    adapter: AdapterId | None = None

    @property
    def adapter_key(self) -> bytes:
        """The adapter's part of the block keys; empty for the base model."""
        return b"" if self.adapter is None else self.adapter.key

    @property
    def may_use_cache(self) -> bool:
        """False if the whole prompt has to be computed here, for its log-probabilities."""
        return self.params.prompt_logprobs is None or bool(self.choices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token; `top` is (token id, logprob), best first; `rank` 1 = likeliest."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token. `index` is its absolute output position, 0 = the first after the prompt."""

    request_id: str
    choice: int
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from position `start` (at least 1) on, each given those before it.

    After a preemption the same positions come again, with the same values.
    """

    request_id: str
    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """State of a `prefill_only` request after a step: the first `num_computed_tokens` tokens have their KV.

    `block_ids` is the block table of KV group 0 from block number `first_block` on, `others` are the other groups'.
    Full blocks below `num_computed_tokens` are committed and immutable. Whoever takes the sequence over needs those
    from number `wanted_from` on (by group; empty: all). The step has computed the latest
    `num_new_tokens`.
    """

    request_id: str
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    first_block: int = 0
    others: tuple[HeldBlocks, ...] = ()
    wanted_from: tuple[int, ...] = ()
    num_new_tokens: int = 0

    @property
    def groups(self) -> tuple[HeldBlocks, ...]:
        """What each KV group holds."""
        return (HeldBlocks(self.first_block, self.block_ids), *self.others)


@dataclass(frozen=True, slots=True)
class HeldKv:
    """The KV of a `prefill_only` request that has ended. The references on `block_ids` pass to the receiver.

    `keys` are the 32-byte keys of the full blocks, in order; the partial last block has none. The other
    fields are as in `PrefillProgress`.
    """

    request_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    num_tokens: int
    num_cached_tokens: int
    first_block: int = 0
    others: tuple[HeldBlocks, ...] = ()
    wanted_from: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[HeldBlocks, ...]:
        """What each KV group holds."""
        return (HeldBlocks(self.first_block, self.block_ids), *self.others)

    @property
    def all_block_ids(self) -> list[int]:
        """In every group."""
        return [block_id for held in self.groups for block_id in held.block_ids]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request the engine had to give up; its blocks are free.

    `error_id` is in the log if there is a traceback; `field` is set if one of its parameters is wrong.
    """

    request_id: str
    message: str
    error_id: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is; units as in WorkerLoad. The adapters' names are sorted.

    `num_tokens_to_compute` are those of requests that were admitted: what the others need, their first look-up says.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_tokens_to_compute: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one engine step produced.

    `admitted` has the ids of the requests that were let run: they have slots, and `prefill_only` ones all their blocks.
    `cached` has (request id, prompt tokens found in the cache) for each request that begins with this step, and
    `loaded` (request id, tier, tokens) those of them that were brought up from a tier.
    `drafts` has (drafted, accepted) tokens for each sequence that had drafts. `seconds` is the step's duration and
    `ended_at` its end, in seconds since the epoch; 0 for an output that no step made (an abort, a refusal).
    `num_prefill_tokens` are those of sequences that are not (only) decoding yet.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    held: list[HeldKv] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[tuple[str, str, int]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)
    seconds: float = 0.0
    num_prefill_tokens: int = 0
    ended_at: float = 0.0

    def num_loaded_tokens(self, request_id: str) -> int:
        """Of the request's cached tokens those that tiers had."""
        return sum(num_tokens for owner, _, num_tokens in self.loaded if owner == request_id)

    def request_ids(self) -> list[str]:
        """Everybody it says something about, sorted."""
        request_ids = {*self.admitted, *(request_id for request_id, _ in self.cached)}
        for named in (self.tokens, self.progress, self.held, self.failed, self.prompt_logprobs):
            request_ids.update(item.request_id for item in named)
        return sorted(request_ids)

"""One choice of a request while the engine works on it, and the trunk from which several choices fork."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.constraint import Constraint
from engine.request import EngineRequest, TokenLogprobs
from engine.tiers.load import TierLoad
from pagewire.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.speculation import DraftRecord


@dataclass(frozen=True, slots=True)
class Attempt:
    """A look-up that could not be used for lack of free blocks, and what stood in its way: `num_missing` of them.

    The hit had `depth` blocks; `next_key` would make it longer (None: nothing would). `num_releases`, `num_restored`
    and `promised` are as they were then.
    """

    num_missing: int
    depth: int
    next_key: bytes | None
    num_releases: int
    num_restored: int
    promised: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and where their KV lies.

    token_ids   [ prompt ............ | output ............ ]
                [ num_computed_tokens .. | still to compute ]      KV of token i: block_table[i // block_size]
                [ committed blocks . | ]                           findable by `keys`, immutable

    `block_table` is that of KV group 0, `other_tables` are the other groups', each in the order of the sequence. A
    group that slides has given back its first `num_released` blocks (by group): `RELEASED` stands for each.

    `branches` is empty for a plain sequence. A trunk has several: it computes what its branches share and is then
    replaced by one sequence for each (choice, output so far). A fresh trunk also samples the first token of each.
    `attempt` is the last look-up of a waiting sequence that has no blocks. `constrain` makes the `constraint`.
    With `wants_prompt_logprobs` the prompt is computed here in full, whatever is cached; each step leaves those of the
    tokens behind the computed ones in `new_prompt_logprobs`. `drafts`: see
    `engine.speculation`. `load`: blocks that come from a tier, to follow those in the table; `loaded_tokens` says how
    many of `num_cached_tokens` came from which tier; `asked_store`: the shared store is asked once each time it waits.
    """

    request: EngineRequest
    arrival: int
    choice: int
    token_ids: list[int]
    branches: tuple[tuple[int, tuple[int, ...]], ...] = ()
    choices_to_sample: tuple[int, ...] = ()
    block_table: list[int] = field(default_factory=list)
    other_tables: list[list[int]] = field(default_factory=list)
    num_released: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0
    num_cached_tokens: int = 0
    loaded_tokens: tuple[tuple[str, int], ...] = ()
    load: TierLoad | None = None
    asked_store: bool = False
    is_running: bool = False
    fair_tag: int = 0
    attempt: "Attempt | None" = None
    drafts: "DraftRecord | None" = None
    constraint: Constraint | None = None
    wants_prompt_logprobs: bool = False
    new_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_constrained: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_constrained = self.request.params.is_constrained  # asked at each token

    def constrain(self, vocab_size: int) -> Constraint:
        """What its next tokens must be like; made at the first call. Raises GrammarError."""
        if self.constraint is None:
            self.constraint = Constraint(self.request, vocab_size)
        return self.constraint

    @property
    def tables(self) -> tuple[list[int], ...]:
        """The block table of each KV group; groups without blocks may be missing."""
        return (self.block_table, *self.other_tables)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prefill_only(self) -> bool:
        return self.request.prefill_only

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return max(0, len(self.token_ids) - self.num_prompt_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens known but not computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Who goes first: lower priority number, the tenants' `FairOrder`, earlier arrival, lower choice."""
        return (self.request.priority, self.fair_tag, self.arrival, self.choice)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`sequence` computes its next `num_new_tokens` tokens; `sample`: then one token for each `choices_to_sample`.

    The last ones of `num_new_tokens` are `draft_token_ids`, guesses of what is sampled after each token before them.
    `is_ahead`: it was planned while the step before it still runs, of which it computes the token that is not known yet
    (`engine/decode_pipeline.py`).
    """

    sequence: Sequence
    num_new_tokens: int
    sample: bool
    draft_token_ids: tuple[int, ...] = ()
    is_ahead: bool = False

    @property
    def start(self) -> int:
        """Position of the first token that it computes, now: before the steps that run are booked."""
        return self.sequence.num_computed_tokens + self.is_ahead


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work. `copies` (source, destination) are whole blocks, to be copied in order before the forward."""

    items: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    admitted: tuple[str, ...] = ()
    cached: tuple[tuple[str, int], ...] = ()
    loaded: tuple[tuple[str, str, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.items

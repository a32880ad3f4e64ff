"""Where a request can run: what the pipeline asks of the fleet, as plain data."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

import grpc

from pagewire.worker_view import AdapterLabel, PrefixSource
from router.explanation import Explanation
from router.prompt_keys import KeySpace, PromptKeys


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the pipeline needs it. (worker id, incarnation) names one process."""

    worker_id: str
    incarnation: int
    endpoint: str
    numerics_class: str = ""

    @property
    def process(self) -> tuple[str, int]:
        """What an exclusion is about: a restarted worker is another process."""
        return self.worker_id, self.incarnation


@dataclass(frozen=True, slots=True)
class Placement:
    """Who prefills (None: the decode worker does), who decodes, and who else holds leading blocks, longest first.

    Prompt tokens: `num_hit_tokens` is what whoever prefills has cached according to the index, `num_device_tokens`
    those of them on its device (what lies below it may find dearer to load than to compute), `num_assumed_tokens` what
    it has or will have if this router's (or another's) last decisions count too, `num_best_tokens` the most that any
    live worker has, `num_expected_tokens` what the policy thinks need not be computed: those assumed and what can be
    fetched.
    """

    prefill: Worker | None
    decode: Worker
    num_hit_tokens: int = 0
    num_assumed_tokens: int = 0
    num_best_tokens: int = 0
    num_device_tokens: int = 0
    num_expected_tokens: int = 0
    prefix_sources: tuple[PrefixSource, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed. `prefill` False: outputs exist already, so only a decode worker is wanted.

    `numerics_class` is that of the worker whose outputs are to be continued; a worker of the same is preferred.
    `prompt_token_ids` are the prompt's and, when a request goes on, those of its output; `keys` are the prompt's.
    `session_id` is for the policy `session`, `request_id` for the log. Only a worker that has the
    `adapter` can take it.
    """

    prompt_token_ids: tuple[int, ...]
    cache_salt: str
    num_output_tokens: int
    num_choices: int
    prefill: bool = True
    numerics_class: str = ""
    keys: PromptKeys | None = None
    session_id: str = ""
    request_id: str = ""
    adapter: AdapterLabel | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest that any live decode worker can take: tokens of a sequence, and of the whole pool."""

    max_model_len: int
    num_pool_tokens: int
    block_size: int


class NoWorker(Exception):
    """Nobody can take it now. `avoided` says that somebody could if nobody were avoided."""

    def __init__(self, message: str, *, avoided: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.avoided = avoided


class Placer(Protocol):
    """Chooses workers; never waits."""

    def limits(self) -> Limits | None:
        """None while no decode worker is known."""
        ...

    def place(self, demand: Demand, avoid: Set[tuple[str, int]] = frozenset()) -> Placement:
        """Raises NoWorker if no decode worker remains; a missing prefill worker only means that decode prefills."""
        ...

    def explain(self, demand: Demand, open_breakers: Set[tuple[str, int]] = frozenset()) -> Explanation:
        """What `place` would do if it were to avoid `open_breakers`, and why, without doing it."""
        ...

    def key_spaces(self) -> list[KeySpace]:
        """What prompts must be hashed for before they are placed; empty if the policy does not look at caches."""
        ...

    def is_alive(self, worker: Worker) -> bool:
        """False once the fleet has lost this process."""
        ...

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        """The worker's channel, shared by all requests."""
        ...

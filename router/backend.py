"""What every door of a router asks, and what it is answered with."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.model import ModelFacts
from router.request import GenerateCall, Piece, Prompt, PromptLogprobs, Summary


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted by the router; sent before any piece."""

    request_id: str
    seed: int
    num_prompt_tokens: int = 0


Output = Started | PromptLogprobs | Piece | Summary


class Backend(Protocol):
    """What the endpoints ask: a `Pipeline`, or what answers like one."""

    @property
    def model(self) -> ModelFacts: ...

    @property
    def max_model_len(self) -> int: ...

    async def tokenize(
        self,
        prompt: Prompt | None,
        *,
        truncate_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        tenant: str | None = None,
    ) -> tuple[int, ...]: ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def generate(self, call: GenerateCall, *, seconds_left: float | None = None) -> AsyncGenerator[Output]: ...

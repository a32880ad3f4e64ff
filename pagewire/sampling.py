"""Sampling parameters as plain data: what the router validates and the engine obeys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

StructureKind = Literal["json_schema", "regex", "grammar", "choice", "json_object"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output's text must look like; `value` is the schema, expression or grammar, `choices` the texts."""

    kind: StructureKind
    value: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Names and defaults are vLLM's; see `protos/pagewire/v1/types.proto` for each field.

    `max_tokens` None means "as many as fit"; the router resolves it before a worker sees it. `seed` is never None
    behind the router. `logprobs` None reports none, 0 the chosen token's, N the N likeliest too; `prompt_logprobs`
    likewise for the prompt's tokens. With `drawable_logprobs` the likeliest are of the tokens that may be drawn.
    `allowed_token_ids` empty allows all.
    """

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
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = None
    drawable_logprobs: bool = False

    @property
    def has_penalties(self) -> bool:
        """What was generated so far changes the logits."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def is_constrained(self) -> bool:
        """Some tokens may not be drawn, whatever their logits (min_tokens aside)."""
        return bool(self.allowed_token_ids or self.bad_words_token_ids or self.structured_output)

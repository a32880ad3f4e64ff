"""`--speculative-config`: a JSON object with vLLM's keys."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class SpeculativeConfig(BaseModel):
    """How tokens are guessed. `ngram`: look where the last tokens stood before in the same text, take what followed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = Field(4, ge=1, le=32, description="Most drafted tokens in one step of a sequence.")
    prompt_lookup_min: int = Field(2, ge=1, le=32, description="Shortest match, in tokens.")
    prompt_lookup_max: int = Field(5, ge=1, le=32, description="Longest match, in tokens.")
    disable_by_batch_size: int = Field(
        64, ge=1, description="No drafts in steps with more running sequences: the processor is busy enough."
    )
    least_acceptance: float = Field(
        0.25, ge=0, le=1, description="A sequence that accepts less of its drafts pauses drafting."
    )
    pause_steps: int = Field(32, ge=1, description="Steps of that pause.")

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError that names the key, its value and the limit."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors())
            raise ValueError(f"must be a JSON object with vLLM's keys; {'; '.join(problems)}") from None

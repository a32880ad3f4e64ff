"""`--speculative-config`: a JSON object with vLLM's keys."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_OF_METHOD = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model", "dtype", "quantization", "max_catch_up_tokens"),
}
"""The keys that only this method has."""


class SpeculativeConfig(BaseModel):
    """How tokens are guessed.

    `ngram`: look where the last tokens stood before in the same text, take what followed. `draft_model`: ask a smaller
    model with the same tokenizer; with a `model` this is the default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram", "draft_model"] = "ngram"
    num_speculative_tokens: int = Field(4, ge=1, le=32, description="Most drafted tokens in one step of a sequence.")
    prompt_lookup_min: int = Field(2, ge=1, le=32, description="Shortest match, in tokens.")
    prompt_lookup_max: int = Field(5, ge=1, le=32, description="Longest match, in tokens.")
    model: str | None = Field(None, min_length=1, description="Directory of the draft model.")
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(None, description="Its compute dtype; None: --dtype.")
    quantization: Literal["none", "int8", "w8a8"] = Field("none", description="Its weights, made on loading.")
    max_catch_up_tokens: int = Field(
        256, ge=16, le=65536, description="Tokens of text that the draft model reads in a step beside its drafts."
    )
    disable_by_batch_size: int = Field(
        64, ge=1, description="No drafts in steps with more running sequences: the processor is busy enough."
    )
    least_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="A sequence that accepts less of its drafts pauses drafting; None: 0.25, or what a draft costs.",
    )
    pause_steps: int = Field(32, ge=1, description="Steps of that pause.")

    @model_validator(mode="before")
    @classmethod
    def _choose_method(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("model") is not None and "method" not in given:
            return {**given, "method": "draft_model"}
        return given

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        for method, names in _OF_METHOD.items():
            for name in names:
                if method != self.method and name in self.model_fields_set:
                    raise ValueError(f"{name} is for method {method}, not for {self.method}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model needs a model, the directory of the draft model")
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

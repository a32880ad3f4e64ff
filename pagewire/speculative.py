"""`--speculative-config`: a JSON object with vLLM's keys."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_METHODS_OF = {
    "prompt_lookup_min": ("ngram", "suffix"),
    "prompt_lookup_max": ("ngram",),
    "max_cached_tokens": ("suffix",),
    **dict.fromkeys(("model", "dtype", "quantization", "max_catch_up_tokens"), ("draft_model",)),
}
"""The methods of keys that not all have."""


class SpeculativeConfig(BaseModel):
    """How tokens are guessed.

    `ngram`: look where the last tokens stood before in the same text, take what followed. `suffix`: also in what the
    latest requests of the same tenant, cache salt and adapter were answered. `draft_model`: ask a smaller
    model with the same tokenizer; with a `model` this is the default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram", "suffix", "draft_model"] = "ngram"
    num_speculative_tokens: int = Field(4, ge=1, le=32, description="Most drafted tokens in one step of a sequence.")
    prompt_lookup_min: int = Field(2, ge=1, le=32, description="Shortest match, in tokens.")
    prompt_lookup_max: int = Field(5, ge=1, le=32, description="Longest match, in tokens.")
    max_cached_tokens: int = Field(
        32768, ge=64, le=1 << 22, description="Tokens of ended requests' outputs that are kept for other requests."
    )
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
        description="Drafts that come true less often pause; None: what a draft costs, as measured.",
    )
    pause_steps: int = Field(32, ge=1, description="Steps of the first pause; each further one is twice as long.")

    @model_validator(mode="before")
    @classmethod
    def _choose_method(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("model") is not None and "method" not in given:
            return {**given, "method": "draft_model"}
        return given

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        for name, methods in _METHODS_OF.items():
            if self.method not in methods and name in self.model_fields_set:
                raise ValueError(f"{name} is for method {' and '.join(methods)}, not for {self.method}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model needs a model, the directory of the draft model")
        if self.method == "ngram" and self.prompt_lookup_min > self.prompt_lookup_max:
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

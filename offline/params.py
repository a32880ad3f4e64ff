"""SamplingParams as vLLM's users know them: how tokens are drawn and how their text is made, in one value."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pagewire import sampling
from router.request import GenerateCall, Prompt, TextOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(sampling.SamplingParams):
    """Names and defaults are vLLM's, except that `max_tokens` None, the default, means "as many as fit".

    `stop` and `bad_words` are a text or several. `truncate_prompt_tokens` keeps the prompt's last tokens, -1 as many as
    leave room for max_tokens. Of `best_of` choices the n likeliest are returned.
    Values are checked when a request is made of them; errors name field, value and limit.
    """

    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: str | Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    best_of: int | None = None


_FIELDS = tuple(field.name for field in fields(sampling.SamplingParams))


def _drawn(params: sampling.SamplingParams) -> sampling.SamplingParams:
    """The part that the engine obeys. Lists become tuples, a `top_k` of -1 (vLLM's older name for "all") 0."""
    values = {name: getattr(params, name) for name in _FIELDS}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if values["top_k"] == -1:
        values["top_k"] = 0
    if values["logit_bias"] is None:
        values["logit_bias"] = {}
    values["allowed_token_ids"] = values["allowed_token_ids"] or ()
    values["bad_words_token_ids"] = tuple(tuple(word) for word in values["bad_words_token_ids"] or ())
    return sampling.SamplingParams(**values)


def _written(params: sampling.SamplingParams) -> TextOptions:
    """The part that makes text."""
    if not isinstance(params, SamplingParams):
        return TextOptions()
    return TextOptions(
        _texts(params.stop),
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        _texts(params.bad_words),
    )


def call_of(
    prompt: Prompt,
    params: sampling.SamplingParams,
    *,
    seed: int | None,
    cache_salt: str,
    priority: int,
    name: str,
    model: str = "",
) -> GenerateCall:
    """All of it as the pipeline takes it; `seed` is for parameters without their own, `name` the request's.

    `model` may be an adapter's name.
    """
    drawn = _drawn(params)
    call = GenerateCall(
        prompt,
        replace(drawn, seed=seed) if drawn.seed is None else drawn,
        _written(params),
        model=model,
        cache_salt=cache_salt,
        priority=priority,
        client_request_id=name,
    )
    if not isinstance(params, SamplingParams):
        return call
    # As in OpenAI's API: with as many as are returned there is nothing to choose.
    best_of = None if params.best_of == params.n else params.best_of
    return replace(call, truncate_prompt_tokens=params.truncate_prompt_tokens, best_of=best_of)


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())

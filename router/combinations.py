"""Which features of a request go together: refused by name is everything that is not exact on every path.

What workers check themselves (structured output with allowed_token_ids, …) is in `pagewire/wire.py`.
"""

from collections.abc import Callable

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.wire import MAX_CHOICES
from router.request import GenerateCall

MAX_BEAMS = 16

_DEFAULTS = SamplingParams()

Test = Callable[[GenerateCall], bool]

FEATURES: dict[str, Test] = {
    "n > 1": lambda call: call.sampling.n > 1,
    "best_of": lambda call: call.best_of is not None,
    "beam_search": lambda call: call.beam_search is not None,
    "logprobs": lambda call: call.sampling.logprobs is not None,
    "prompt_logprobs": lambda call: call.sampling.prompt_logprobs is not None,
    "structured_output": lambda call: call.sampling.structured_output is not None,
    "allowed_token_ids": lambda call: bool(call.sampling.allowed_token_ids),
    "bad_words": lambda call: bool(call.text_options.bad_words or call.sampling.bad_words_token_ids),
    "logit_bias": lambda call: bool(call.sampling.logit_bias),
    "penalties": lambda call: call.sampling.has_penalties,
    "min_tokens": lambda call: call.sampling.min_tokens > 0,
    "ignore_eos": lambda call: call.sampling.ignore_eos,
    "stop": lambda call: bool(call.text_options.stop),
    "stop_token_ids": lambda call: bool(call.sampling.stop_token_ids),
    "truncate_prompt_tokens": lambda call: call.truncate_prompt_tokens is not None,
}
"""Every feature by its name in errors and in docs/generation.md."""

FIELDS = {
    "n > 1": "sampling.n",
    "best_of": "best_of",
    "beam_search": "beam_search",
    "bad_words": "text_options.bad_words",
    "penalties": "sampling.repetition_penalty",
    "stop": "text_options.stop",
    "truncate_prompt_tokens": "truncate_prompt_tokens",
}
"""Fields of features that have another name than theirs in `sampling`."""

_NOT_WITH_BEAMS = ("best_of", "logit_bias", "penalties")  # they would change what a beam's score is
_NOT_WITH_STRUCTURE = ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos")

REFUSED: dict[frozenset[str], str] = {
    **{frozenset({"beam_search", other}): other for other in _NOT_WITH_BEAMS},
    **{frozenset({"structured_output", other}): other for other in _NOT_WITH_STRUCTURE},
}
"""Pairs that are refused -> the feature that the error names."""


def validate_combination(call: GenerateCall) -> None:
    """Raises InvalidArgument for the first pair that does not go together, and for best_of and beams out of range."""
    present = {name for name, is_set in FEATURES.items() if is_set(call)}
    for pair, named in REFUSED.items():
        if pair <= present:
            (other,) = pair - {named}
            field = _set_penalty(call) if named == "penalties" else FIELDS.get(named, f"sampling.{named}")
            raise InvalidArgument(field, None, f"is not supported together with {other}")
    if call.best_of is not None and not call.sampling.n <= call.best_of <= MAX_CHOICES:
        limit = f"must be in n = {call.sampling.n} … {MAX_CHOICES}"
        raise InvalidArgument("best_of", call.best_of, limit)
    beams = call.beam_search
    if beams is not None:
        if not 2 <= beams.num_beams <= MAX_BEAMS:
            raise InvalidArgument("beam_search.num_beams", beams.num_beams, f"must be in 2 … {MAX_BEAMS}")
        if call.sampling.n > beams.num_beams:
            limit = f"must be at most beam_search.num_beams = {beams.num_beams}"
            raise InvalidArgument("sampling.n", call.sampling.n, limit)
        _refuse_drawing(call.sampling)
        if not abs(beams.length_penalty) <= 100:
            raise InvalidArgument("beam_search.length_penalty", beams.length_penalty, "must be in [-100, 100]")


def _set_penalty(call: GenerateCall) -> str:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return f"sampling.{next(name for name in names if getattr(call.sampling, name) != getattr(_DEFAULTS, name))}"


def _refuse_drawing(sampling: SamplingParams) -> None:
    """A beam search draws nothing; a temperature of 0 or 1 is what clients send who mean nothing by it."""
    for name, neutral in (("temperature", (0.0, 1.0)), ("top_p", (1.0,)), ("top_k", (0,)), ("min_p", (0.0,))):
        value = getattr(sampling, name)
        if value not in neutral:
            raise InvalidArgument(f"sampling.{name}", value, "is not supported together with beam_search")

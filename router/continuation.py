"""What a request still asks of workers, fresh or with outputs that are facts already. Pure.

`so_far` is the state of every choice by number, empty while there is no output.
"""

from collections.abc import Mapping

from router.placement import Demand, Worker
from router.request import ChoiceSoFar, WorkerCall


def demand(call: WorkerCall, so_far: Mapping[int, ChoiceSoFar], lost: Worker | None, *, may_prefill: bool) -> Demand:
    """What is to be placed. `lost` made the outputs, if somebody did; its numerics class is preferred.

    A migrated request goes through prefill like a fresh one: there its prompt is cached, as a rule.
    """
    outputs = _open_outputs(call, so_far)
    # As on the workers: the output of a single choice is prefilled like a prompt, those of several are decode's.
    output = outputs[0] if len(outputs) == 1 else ()
    # Of several choices with output prefill gets what they share, the tokens before the prompt's last: perhaps none.
    has_prefix = len(call.prompt_token_ids) > 1 or not so_far or len(outputs) == 1
    return Demand(
        (*call.prompt_token_ids, *output),
        call.cache_salt,
        (call.sampling.max_tokens or 1) - len(output),
        len(outputs),
        may_prefill and has_prefix,
        "" if lost is None else lost.numerics_class,
        call.keys,
        call.session_id,
        call.request_id,
        call.adapter,
    )


def needs_decode(attempt: WorkerCall) -> bool:
    """False if the tokens that prefill samples are the last ones that were asked for.

    Prefill samples the next token of every choice, but not of several that have output.
    """
    outputs, max_tokens = _open_outputs(attempt, attempt.choices), attempt.sampling.max_tokens or 1
    samples = not attempt.choices or len(outputs) == 1
    return not samples or any(len(output) + 1 < max_tokens for output in outputs)


def _open_outputs(call: WorkerCall, so_far: Mapping[int, ChoiceSoFar]) -> list[tuple[int, ...]]:
    """What each choice that is not finished has brought."""
    if not so_far:
        return [()] * call.sampling.n
    return [choice.output_token_ids for choice in so_far.values() if not choice.finished]

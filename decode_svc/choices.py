"""What the choices of a request share, and what the first tokens of a prefill make of them. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from engine.admission import open_branches
from engine.request import ChoiceState, EngineRequest
from transfer_svc.client import FirstToken


def shared_token_ids(request: EngineRequest) -> tuple[int, ...]:
    """The tokens all open choices start with: the prompt and, if there is only one, that choice's output so far."""
    branches = open_branches(request)
    return request.prompt_token_ids + (branches[0][1] if len(branches) == 1 else ())


def merge_first_tokens(request: EngineRequest, first_tokens: Sequence[FirstToken], max_model_len: int) -> EngineRequest:
    """The request with the tokens that prefill sampled. One that is known already stays: it is a fact.

    A choice that has all its tokens is finished: the router owns the length finish and sends nothing that needs more.
    """
    states = {state.choice: state for state in request.choices}
    most = max_model_len - len(request.prompt_token_ids)
    if request.params.max_tokens is not None:
        most = min(most, request.params.max_tokens)
    for token in first_tokens:
        state = states.get(token.choice, ChoiceState(token.choice))
        if token.index == len(state.output_token_ids) and not state.finished:
            output = (*state.output_token_ids, token.token_id)
            states[token.choice] = ChoiceState(token.choice, output, token.finished or len(output) >= most)
    return replace(request, choices=tuple(states[choice] for choice in sorted(states)))

"""A sequence that speculates against a clock of its own: what a step, a draft and a row more take is given."""

from dataclasses import dataclass
from random import Random

from engine.request import EngineRequest
from engine.sequence import Sequence
from engine.speculation import MADE, Allowance, Speculator
from pagewire.sampling import SamplingParams

_USUAL_LAG = 2


@dataclass(frozen=True)
class Times:
    """In steps without drafts: of a draft, of a row more in a step, of a token of text that the draft model reads."""

    draft: float = 0.55
    row: float = 0.03
    read: float = 0.03


class DraftModel:
    """The proposer: it has to read first what it has not drafted."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_to_read = 0

    def propose(self, sequence: Sequence, allowance: Allowance) -> tuple[int, ...]:
        lag = sequence.num_tokens - self.num_read
        drafts = (5,) * allowance(MADE, lag if lag > _USUAL_LAG else 0)
        self.num_to_read = lag if drafts and lag > _USUAL_LAG else 0
        if drafts:
            self.num_read = sequence.num_tokens
        return drafts


@dataclass(frozen=True)
class Outcome:
    """Of one sequence: `speed_up` is the time without speculation relative to the time with it."""

    speed_up: float
    num_drafted: int
    allowed: float


def say(
    speculator: Speculator,
    model: DraftModel,
    share: float,
    num_tokens: int,
    rng: Random,
    *,
    times: Times = Times(),
    num_prompt_tokens: int = 10,
) -> Outcome:
    """A sequence of as many tokens, of whose drafts this share come true."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    sequence = Sequence(EngineRequest("r", (1,) * num_prompt_tokens, params), 1, 0, [1] * num_prompt_tokens, (0,))
    model.num_read = 0
    seconds, num_drafted, num_steps = 0.0, 0, 0
    while (left := num_tokens - sequence.num_output_tokens) > 0:
        drafts = len(speculator.propose(sequence, left - 1, 1))
        accepted = 0
        while accepted < drafts and rng.random() < share:
            accepted += 1
        step = 1 + times.row * drafts
        speculator.costs.observe_step(1 + drafts, step)
        if drafts:
            drafting = times.draft * drafts + times.read * model.num_to_read
            speculator.costs.observe_drafting(drafts, drafts + max(1, model.num_to_read), drafting)
            speculator.learn(sequence, drafts, accepted)
            step += drafting
            model.num_read += min(accepted, drafts - 1)
        sequence.token_ids += [2] * (1 + accepted)
        seconds, num_drafted, num_steps = seconds + step, num_drafted + drafts, num_steps + 1
    tokens_per_step = num_tokens / num_steps
    return Outcome(num_tokens / seconds, num_drafted, tokens_per_step / (1 + num_drafted / num_steps * times.draft))

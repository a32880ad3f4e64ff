"""How many tokens a step may have to take about as long as asked: who waits for it doesn't wait longer.

Pure: whoever runs the steps brings their times.
"""

from engine.rates import Rate

LEAST_TOKENS = 32
"""Of prompts in a step, however slow the machine is: a step reads all weights, and fewer rows take hardly less time."""


class StepPace:
    """From the rate of the latest steps with prompts. It settles where a step takes the time that was asked for."""

    def __init__(self, target_seconds: float, max_tokens: int) -> None:
        """`max_tokens`: of a step, before any was measured, and ever."""
        self._target = target_seconds
        self._max_tokens = max_tokens
        self._rate = Rate(max_tokens / target_seconds, target_seconds)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed some of a prompt; `num_tokens` with what decoded beside it."""
        self._rate.observe(num_tokens, seconds)

    def for_prompts(self, num_decodes: int) -> int:
        """Tokens for prompts in a step in which so many others are computed too."""
        allowed = int(self._target * self._rate.per_second) - num_decodes
        return min(max(allowed, LEAST_TOKENS), self._max_tokens)

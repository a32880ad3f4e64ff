"""What became of one request, as its client saw it. Pure; seconds on one clock that begins with the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """`arrived_at`: when it was due; `sent_at`: when it went out, late if --max-concurrency held it back.

    `token_times` has one entry for each message that brought tokens (usually one token). `code` is empty for a request
    that ended well, else what the server or the transport called the failure.
    """

    arrived_at: float
    sent_at: float
    token_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    code: str = ""
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.code

    @property
    def ttft(self) -> float | None:
        """Until the first token; None if none came."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def latency(self) -> float:
        """Until the last token; of a request without tokens, until its end."""
        return (self.token_times[-1] if self.token_times else self.ended_at) - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for fewer than two."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between messages with tokens."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def queue_time(self) -> float:
        """How long after it was due it went out: --max-concurrency held it back, or the sender was busy."""
        return self.sent_at - self.arrived_at


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. `num_unfinished` were in flight or not sent yet when it was interrupted."""

    outcomes: Sequence[Outcome]
    duration: float
    num_unfinished: int = 0

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.is_good]

    @property
    def errors_by_code(self) -> dict[str, int]:
        """Failures by code, the most frequent first."""
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            if outcome.code:
                counts[outcome.code] = counts.get(outcome.code, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

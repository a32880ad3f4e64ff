"""What a draft costs, as measured: a forward's time is `first + row * (rows - 1)`, for the served model and the draft.

Pure: whoever runs the forwards brings the times.
"""

_USUAL_ROW = 0.05  # of a forward's first row, until enough was measured
_KEPT = 0.98  # weight of what was measured before: the latest fifty or so count
_OUTLIER = 2.0  # a forward that takes longer than this, relative to what was expected, was held up by something else
_FEW, _ENOUGH = 4.0, 16.0  # forwards
_RIDGE = 0.5  # variance of rows at which measured and usual slope count alike


class ForwardTimes:
    """A line through (rows, seconds) of forwards, by least squares; older ones count less and less."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_rows = 0.0
        self._mean_seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    @property
    def weight(self) -> float:
        """Forwards that it goes by."""
        return self._weight

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def row(self) -> float:
        """Seconds that one row more takes."""
        usual = self._mean_seconds / (1 / _USUAL_ROW + self._mean_rows - 1)
        slope = (self._covariance + _RIDGE * usual) / (self._variance + _RIDGE)
        return min(max(slope, 0.0), self._mean_seconds / max(1.0, self._mean_rows))

    def of(self, num_rows: float) -> float:
        """Seconds of a forward."""
        return self._mean_seconds + self.row * (num_rows - self._mean_rows)

    def observe(self, num_rows: float, seconds: float) -> None:
        if self._weight >= _FEW:
            seconds = min(seconds, _OUTLIER * self.of(num_rows))
        self._weight = _KEPT * self._weight + 1
        share = 1 / self._weight
        off_rows, off_seconds = num_rows - self._mean_rows, seconds - self._mean_seconds
        self._mean_rows += share * off_rows
        self._mean_seconds += share * off_seconds
        self._variance += share * (off_rows * (num_rows - self._mean_rows) - self._variance)
        self._covariance += share * (off_rows * (seconds - self._mean_seconds) - self._covariance)


class DraftCosts:
    """Costs are in steps of one sequence: a sequence's share of a step without drafts is 1."""

    def __init__(self, made: float = 0.0) -> None:
        """`made`: what the draft model takes for a token, relative to the served one, until it was measured."""
        self._expected_made = made
        self._served = ForwardTimes()
        self._draft = ForwardTimes()
        self._has_drafted = False

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step of the served model in which everybody decoded."""
        self._served.observe(num_rows, seconds)

    def observe_drafting(self, num_forwards: int, num_rows: int, seconds: float) -> None:
        """The draft model's forwards of one step; the first ones say nothing, since they make the record of a step."""
        if not self._has_drafted:
            self._has_drafted = True
            return
        self._draft.observe(num_rows / num_forwards, seconds / num_forwards)

    def to_check(self, num_running: int) -> float:
        """Of one draft's row in the served model's step."""
        if not self._served.is_known:
            return _USUAL_ROW * num_running / (1 + _USUAL_ROW * (num_running - 1))
        return self._served.row / self._share(num_running)

    def to_make(self, num_running: int) -> float:
        """Of one draft of the draft model, if it drafts for all."""
        if not (self._served.is_known and self._draft.is_known):
            return self._expected_made
        measured = self._draft.of(num_running) / num_running / self._share(num_running)
        known = min(1.0, self._draft.weight / _ENOUGH)
        return known * measured + (1 - known) * self._expected_made

    def to_catch_up(self, num_tokens: int, num_running: int) -> float:
        """Of the draft model's reading so many tokens of text."""
        if not (self._served.is_known and self._draft.is_known):
            return _USUAL_ROW * self._expected_made * num_tokens
        return self._draft.row * num_tokens / self._share(num_running)

    def _share(self, num_running: int) -> float:
        """Seconds of a step without drafts for one of its sequences."""
        return max(self._served.of(num_running) / num_running, 1e-9)

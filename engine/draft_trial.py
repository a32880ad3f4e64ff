"""How often drafts come true, estimated from few of them. Pure."""

from dataclasses import dataclass

_LONGEST_BACK_OFF = 5  # doublings of a pause


@dataclass(slots=True)
class DraftTrial:
    """Drafts of one kind: `right` and `wrong` are counts in which the older ones fade.

    Of k drafts in a step, a accepted: a were right, one more was wrong if a < k, and of the others nothing is known.
    A new trial begins with what is usual, as if it had seen that. `resume_at` is the sequence's step from which on it
    may try again, `num_failures` how often in a row it did not pay, `is_paid` that it
    is trying again: nothing has come of that yet.
    """

    right: float
    wrong: float
    kept: float
    resume_at: int = 0
    num_failures: int = 0
    is_paid: bool = False

    @classmethod
    def begin(cls, share: float, weight: float, kept: float) -> "DraftTrial":
        """As if `weight` drafts had been seen, of which this share came true; a step keeps `kept` of older ones."""
        return cls(weight * share, weight * (1 - share), kept)

    @property
    def share(self) -> float:
        """The likelihood that a draft comes true, those before it having come true."""
        total = self.right + self.wrong
        return self.right / total if total else 0.0

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What came of the drafts of one step."""
        self.is_paid = False
        self.right = self.kept * self.right + num_accepted
        self.wrong = self.kept * self.wrong + (num_accepted < num_drafted)

    def num_worth(self, cost: float, most: int) -> int:
        """Drafts that pay: the k-th one comes true with share^k, and saves a step where it does."""
        likelihood, count, share = 1.0, 0, self.share
        while count < most and (likelihood := likelihood * share) >= cost:
            count += 1
        return count

    def judge(self, *, pays: bool, step: int, pause: int, doubles: bool) -> None:
        """After `learn`: a pause where drafts do not pay; if it `doubles`, twice as long each time."""
        if pays:
            self.num_failures = 0
            return
        self.resume_at = step + pause * 2 ** (min(self.num_failures, _LONGEST_BACK_OFF) * doubles)
        self.num_failures += 1

"""How often drafts come true, estimated from few of them, how many are worth their cost, and what may be lost on them.

Pure. Costs and savings are in steps of the sequence.
"""

from dataclasses import dataclass

_LONGEST_BACK_OFF = 5  # doublings of a pause
STAKE = 1.2
"""Steps that a sequence's drafts of one kind may lose on the whole."""


@dataclass(slots=True)
class DraftTrial:
    """Drafts of one kind: `right` and `wrong` are counts in which the older ones fade.

    Of k drafts in a step, a accepted: a were right, one more was wrong if a < k, and of the others nothing is known.
    A new trial begins with what is usual, as if it had seen that. `resume_at` is the sequence's step from which on it
    may try again, `num_failures` how often in a row it did not pay, `is_paid` that it is trying again: nothing has come
    of that yet. `gained` is what its drafts have brought so far, less what they have cost.
    """

    right: float
    wrong: float
    kept: float
    resume_at: int = 0
    num_failures: int = 0
    is_paid: bool = False
    gained: float = 0.0

    @classmethod
    def begin(cls, share: float, weight: float, kept: float) -> "DraftTrial":
        """As if `weight` drafts had been seen, of which this share came true; a step keeps `kept` of older ones."""
        return cls(weight * share, weight * (1 - share), kept)

    @property
    def share(self) -> float:
        """The likelihood that a draft comes true, those before it having come true."""
        total = self.right + self.wrong
        return self.right / total if total else 0.0

    def learn(self, num_drafted: int, num_accepted: int, cost: float = 0.0) -> None:
        """What came of the drafts of one step, each of which took `cost`."""
        self.is_paid = False
        self.right = self.kept * self.right + num_accepted
        self.wrong = self.kept * self.wrong + (num_accepted < num_drafted)
        self.gained += num_accepted - cost * num_drafted

    def num_likely(self, least: float, most: int) -> int:
        """Drafts that come true with at least this likelihood: the k-th one does with share^k."""
        likelihood, count, share = 1.0, 0, self.share
        while count < most and (likelihood := likelihood * share) >= least:
            count += 1
        return count

    def num_best(self, cost: float, most: int) -> int:
        """Drafts with which a token takes least time, see `speed_up`; 0 if that is none. Of equals the fewest."""
        likelihood, num_tokens, best, share = 1.0, 1.0, 1.0, self.share
        for count in range(1, most + 1):
            likelihood *= share
            num_tokens += likelihood
            if num_tokens <= best * (1 + count * cost):  # more drafts only make it worse
                return count - 1
            best = num_tokens / (1 + count * cost)
        return most

    @property
    def can_lose(self) -> float:
        """Before more would be lost than may be: what was gained may be lost again."""
        return STAKE + self.gained

    def trust(self, cost: float) -> None:
        """A risk has come true: another draft may fail, whatever was lost before."""
        self.gained = max(self.gained, cost - STAKE)

    def judge(self, *, pays: bool, step: int, pause: int, longest: int | None = None) -> None:
        """After `learn`: a pause where drafts do not pay, twice as long each time, at most the `longest`."""
        if pays:
            self.num_failures = 0
            return
        pause *= 2 ** min(self.num_failures, _LONGEST_BACK_OFF)
        self.resume_at = step + (pause if longest is None else min(pause, longest))
        self.num_failures += 1


def speed_up(share: float, cost: float, num_drafts: int) -> float:
    """Tokens in the time of a plain step: (1 + p + ... + p^n) / (1 + n c), Leviathan et al. 2023, theorem 3.8."""
    return sum(share**k for k in range(num_drafts + 1)) / (1 + num_drafts * cost)

"""A step while it is planned: what is left of its budget, and who has what of it. Pure."""

from dataclasses import dataclass, field

from engine.sequence import Schedule, ScheduledSequence, Sequence


@dataclass(slots=True)
class PlannedStep:
    """What is left of one step's budget and what was planned with it."""

    budget: int
    items: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.items[sequence] = num_tokens
        self.budget -= num_tokens

    def add_draft(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        self.drafts[sequence] = token_ids
        self.budget -= len(token_ids)

    def planned(self) -> Schedule:
        items = tuple(
            ScheduledSequence(
                seq,
                num + len(drafts := self.drafts.get(seq, ())),
                bool(seq.choices_to_sample) and num == seq.num_remaining_tokens,
                drafts,
            )
            for seq, num in self.items.items()
        )
        return Schedule(items, tuple(self.copies), tuple(self.admitted), tuple(self.cached), tuple(self.loaded))

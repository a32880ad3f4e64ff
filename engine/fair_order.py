"""Fair order between tenants: start tags of start-time fair queueing (Goyal, Vin, Cheng 1996), in tokens. Pure.

A request's tag says how much service its tenant will have had when it starts; lower tags go first:

    tag = max(clock, end of the tenant's previous request)      clock = tag of the request that started last
    A floods with requests of 10:  tags 0 10 20 30 40 …         B comes when 20 has started: tags 20 30 40 …

So B waits for nothing but what runs, and then both take turns. A tenant alone is served in order of arrival. Tags never
change: together with the arrival it is a total order, and a request is passed only by those that were owed service.
What was reserved and not used (an early end of sequence, cached tokens) is given back to the tenant's later requests.
"""

from dataclasses import dataclass

MAX_FLOWS = 4096


@dataclass(slots=True)
class _Flow:
    """One tenant at one priority: its newest tag, and where the next one would begin."""

    last: int
    end: int


class FairOrder:
    """Tags for requests of any priority; priorities do not know of each other."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._flows: dict[tuple[int, str], _Flow] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def tag(self, priority: int, tenant: str, cost: int) -> int:
        """The tag of a new request that may need `cost` tokens of work."""
        tag = self._clocks.get(priority, 0)
        flow = self._flows.get((priority, tenant))
        if flow is not None:
            tag = max(tag, flow.last, flow.end)
        elif len(self._flows) >= MAX_FLOWS:
            self._forget_some()
        self._flows[priority, tenant] = _Flow(tag, tag + cost)
        return tag

    def started(self, priority: int, tag: int) -> None:
        """The request with this tag runs."""
        self._clocks[priority] = max(self._clocks.get(priority, 0), tag)

    def give_back(self, priority: int, tenant: str, num_tokens: int) -> None:
        """A request has ended and needed less than it said. Tags that were given stay in order of arrival."""
        flow = self._flows.get((priority, tenant))
        if flow is not None:
            flow.end = max(flow.last, flow.end - num_tokens)

    def reset(self) -> None:
        """Nobody waits or runs: nobody is owed anything."""
        self._clocks.clear()
        self._flows.clear()

    def _forget_some(self) -> None:
        """Those that are owed nothing, which changes nothing; else the older half, whose debts are forgiven."""
        clocks = self._clocks
        kept = {key: flow for key, flow in self._flows.items() if flow.end > clocks.get(key[0], 0)}
        if len(kept) >= MAX_FLOWS:
            kept = dict(list(kept.items())[MAX_FLOWS // 2 :])
        self._flows = kept

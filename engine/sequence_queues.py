"""Who waits and who runs, both by rank, and which sequences make up a request."""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from engine.fair_order import FairOrder
from engine.request import EngineRequest
from engine.sequence import Sequence


def by_rank(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.rank


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended. `is_admitted`: one of its sequences was let run. `has_begun`: a step had
    tokens of it, its cache hits were reported.

    `num_reserved_tokens` is what its tenant was charged for and is not computed yet.
    """

    sequences: list[Sequence]
    is_admitted: bool = False
    has_begun: bool = False
    num_reserved_tokens: int = 0


class SequenceQueues:
    """Every sequence of every live request is in exactly one of the two queues."""

    def __init__(self) -> None:
        self.requests: dict[str, LiveRequest] = {}
        self.waiting: list[Sequence] = []  # may hold blocks (adopted, or forked with no slot free)
        self.running: list[Sequence] = []
        self.num_changes = 0
        """How often a sequence has come, gone or moved since the start."""
        self._fair_order = FairOrder()

    def add(self, request: EngineRequest, sequences: Iterable[Sequence], num_tokens: int) -> None:
        """A new request, which may need `num_tokens` tokens of work; its sequences wait."""
        self.num_changes += 1
        live = self.requests[request.request_id] = LiveRequest(list(sequences), num_reserved_tokens=num_tokens)
        tag = self._fair_order.tag(request.priority, request.tenant, num_tokens)
        for sequence in live.sequences:
            sequence.fair_tag = tag
            insort(self.waiting, sequence, key=by_rank)

    def run(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self.waiting.remove(sequence)
        sequence.is_running = True
        insort(self.running, sequence, key=by_rank)
        self._fair_order.started(sequence.request.priority, sequence.fair_tag)

    def count_work(self, sequence: Sequence, num_tokens: int) -> None:
        """So much was computed of what its request had reserved."""
        self.requests[sequence.request_id].num_reserved_tokens -= num_tokens

    def wait(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self.running.remove(sequence)
        sequence.is_running = False
        insort(self.waiting, sequence, key=by_rank)

    def replace(self, trunk: Sequence, branches: list[Sequence], num_running: int) -> None:
        """Puts `branches` in the place of a running `trunk`; the first `num_running` of them run."""
        self.requests[trunk.request_id].sequences += branches
        self.remove(trunk)
        for i, branch in enumerate(branches):
            branch.is_running = i < num_running
            insort(self.running if branch.is_running else self.waiting, branch, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, and its request with the last one."""
        self.num_changes += 1
        (self.running if sequence.is_running else self.waiting).remove(sequence)
        sequence.is_running = False
        live = self.requests[sequence.request_id]
        live.sequences.remove(sequence)
        if not live.sequences:
            request = sequence.request
            del self.requests[request.request_id]
            self._fair_order.give_back(request.priority, request.tenant, max(0, live.num_reserved_tokens))
        if not self.requests:
            self._fair_order.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError when queues and requests do not agree."""
        queued = [*self.waiting, *self.running]
        listed = [sequence for live in self.requests.values() for sequence in live.sequences]
        if sorted(map(id, queued)) != sorted(map(id, listed)):
            raise AssertionError("queues and requests do not have the same sequences")
        if any(sequence.is_running for sequence in self.waiting) or not all(s.is_running for s in self.running):
            raise AssertionError("a sequence is in the wrong queue")
        if any(queue != sorted(queue, key=by_rank) for queue in (self.waiting, self.running)):
            raise AssertionError("a queue is not in order of rank")

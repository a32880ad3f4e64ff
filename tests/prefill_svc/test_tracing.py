"""What a chunk's span says of its tokens, over a preemption too."""

from types import SimpleNamespace
from typing import Any

from prefill_svc.tracing import TracedPrefillWorker, _Parts
from tests.engine.harness import Harness


class Recorded:
    """A span that keeps what it is ended with; `ended` is the whole tree's."""

    def __init__(self, name: str, ended: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.ended = name, ended

    def child(self, name: str, **_: object) -> "Recorded":
        return Recorded(name, self.ended)

    def end(self, error: BaseException | None = None, *, at: int | None = None, **attributes: Any) -> None:
        self.ended.append((self.name, attributes))


def test_chunks_of_a_preempted_prefill_count_what_they_computed() -> None:
    harness = Harness(windows=(None, 5), num_blocks=24, max_num_batched_tokens=4, enable_caching=False)
    ended: list[tuple[str, dict[str, Any]]] = []
    parts: Any = _Parts(Recorded("prefill", ended))  # type: ignore[arg-type]
    worker: Any = SimpleNamespace(parts={"second": parts})
    for name, num_tokens in (("first", 24), ("second", 20)):
        harness.ask(name, num_tokens, max_tokens=2, prefill_only=True)
    TracedPrefillWorker._trace(worker, harness.step())
    taken = harness.cache.allocate(harness.cache.num_free) or []
    for _ in range(30):
        TracedPrefillWorker._trace(worker, harness.step())
    assert harness.scheduler.num_preemptions > 0
    harness.cache.release(taken)
    while harness.scheduler.has_work:
        TracedPrefillWorker._trace(worker, harness.step())
    chunks = [attributes for name, attributes in ended if name == "chunk"]
    ends = [chunk["num_computed_tokens"] for chunk in chunks]
    again = next(i for i in range(1, len(ends)) if ends[i] <= ends[i - 1])  # from the beginning
    assert again < len(ends) - 1
    for part in (chunks[:again], chunks[again:]):
        assert sum(chunk["num_tokens"] for chunk in part) == part[-1]["num_computed_tokens"]
        assert min(chunk["num_tokens"] for chunk in part) > 0
    harness.check_idle()

"""A bar of requests with the rate of tokens, on stderr, for people: a terminal or a notebook. Elsewhere nothing."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class TokenProgress:
    """Counts; draws nothing by itself. One thread calls it."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.num_tokens = 0
        self._started_at: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by the time since the first of them."""
        return 0.0 if self._started_at is None else self.num_tokens / max(1e-3, time.monotonic() - self._started_at)

    def tokens(self, count: int) -> None:
        """That many more output tokens."""
        if self._started_at is None:
            self._started_at = time.monotonic()
        self.num_tokens += count

    def finished(self) -> None:
        """One more request has ended."""
        self.num_finished += 1


class _Drawn(TokenProgress):
    def __init__(self, bars: "Progress", task: "TaskID") -> None:
        super().__init__()
        self._bars = bars
        self._task = task

    def tokens(self, count: int) -> None:
        super().tokens(count)
        self._show()

    def finished(self) -> None:
        super().finished()
        self._show()

    def _show(self) -> None:
        self._bars.update(self._task, completed=self.num_finished, speed=f"{self.tokens_per_second:,.0f} tokens/s")


@contextmanager
def token_progress(total: int | None, *, shown: bool, console: "Console | None" = None) -> Iterator[TokenProgress]:
    """A bar of `total` requests (None: unknown); `console` replaces stderr."""
    if not shown or (console is None and not sys.stderr.isatty() and "ipykernel" not in sys.modules):
        yield TokenProgress()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bars:
        yield _Drawn(bars, bars.add_task("requests", total=total, speed=""))

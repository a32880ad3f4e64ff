"""Progress on stderr, for people only: where stderr is no terminal nothing is drawn, and rich is not even imported."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def stage_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a callback (stage, done, total) that draws one bar per stage."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{title}: {stage}", total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def waiting_for(names: Iterable[str]) -> Iterator[Callable[[str, str, bool], None]]:
    """Draws one spinner per name, gone at the end; yields a callback (name, what it does now, done)."""
    if not sys.stderr.isatty():
        yield lambda name, note, done: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {name: progress.add_task(name, total=1, note="") for name in names}

        def show(name: str, note: str, done: bool) -> None:
            # A log line is time, level, process, logger and, after a colon, what matters here.
            note = "" if done else escape(note.partition(": ")[2][:60])
            progress.update(tasks[name], completed=int(done), note=note)

        yield show

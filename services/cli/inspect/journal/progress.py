"""A progress bar for reading a whole journal; hidden if the output is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]  # (records done, records in all)


@contextmanager
def shown(console: Console | None) -> Iterator[Advance]:
    if console is None or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading records", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

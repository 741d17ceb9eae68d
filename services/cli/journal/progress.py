"""A bar for work on a whole journal; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]  # (bytes done, bytes in all)


@contextmanager
def shown(console: Console | None) -> Iterator[Advance]:
    if console is None or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading the journal", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

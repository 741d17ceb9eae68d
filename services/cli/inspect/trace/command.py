"""The two things that ``millrace trace`` does: list task groups, and tell all about one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from services.cli.console.plain import say
from services.cli.inspect.trace.listing import choose, counted, read_groups, show_lines
from services.cli.inspect.trace.reading import read_group
from services.cli.inspect.trace.view import as_json as group_as_json
from services.cli.inspect.trace.view import show


def list_groups(
    run_dir: Path, console: Console, *, order: str, state: str | None, step: int | None, last: int, as_json: bool
) -> None:
    """Raises ``ConfigError`` when the directory has no journal."""
    groups = read_groups(run_dir)
    lines = choose(groups, order=order, state=state, step=step, last=last)
    counts = counted(groups)
    if as_json:
        typer.echo(json.dumps({"task_groups": [asdict(line) for line in lines], "counts": counts}))
        return
    if lines:
        show_lines(lines, console)
    else:
        console.print("no task group matches")
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    say(console, f"{len(groups)} task groups: {told or 'none was issued yet'}")


def show_group(
    run_dir: Path, task_group_id: str, console: Console, *, phases: bool, output: Path | None, as_json: bool
) -> None:
    """Raises ``ConfigError`` for a task group that was never issued."""
    facts = read_group(run_dir, task_group_id)
    if as_json:
        typer.echo(json.dumps(group_as_json(facts)))
    else:
        show(facts, console, with_slots=phases)
    if output is not None:
        from services.cli.inspect.trace.picture import draw

        picture = draw(facts, output)
        if not as_json:
            say(console, f"picture: {picture}")

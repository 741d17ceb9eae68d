"""``rollmill journal RUN``: its commands and their output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.console import console, say

HELP = """\
List, verify and repair the journal of a run.

The journal is RUN/journal: everything that the orchestrator has acknowledged, in segments of compressed JSON lines, and an
index of them. RUN may be running, stopped or broken; every command but `repair` and `compact` only reads.

    rollmill journal RUN verify              read every record, compare its checksum; exit code 1 when one is damaged
    rollmill journal RUN list --set-aside    records that the run does not use, and why
    rollmill journal RUN list --kind versions --last 5
    rollmill journal RUN repair --dry-run    records that `repair` would set aside
    rollmill journal RUN compact             delete trajectories that are not needed any more
    rollmill journal RUN export -o rows      JSONL, or Parquet, that `datasets` opens

The orchestrator sets a damaged record aside when it starts, logs it, and continues. docs/journal.md describes the effect of
losing each kind of record.
"""

journal_app = typer.Typer(no_args_is_help=True, help=HELP, rich_markup_mode="markdown", subcommand_metavar="COMMAND")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@journal_app.callback(invoke_without_command=True)
def journal(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000.")],
) -> None:
    context.obj = run
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@journal_app.command()
def verify(context: typer.Context, as_json: JsonOption = False) -> None:
    """Read every record and compare its checksum; exit code 1 when one is damaged or lost.

    Reads the whole journal: minutes for hundreds of gigabytes. A record that is being written at the end of a segment
    is no damage.
    """
    from services.cli.inspect.journal.checks import as_object, show_verified, shown, verify_journal

    with shown(console if not as_json else None) as advance:
        found = verify_journal(context.obj, advance)
    if as_json:
        typer.echo(json.dumps(as_object(found)))
    else:
        show_verified(found, console)
    if found.is_damaged:
        raise typer.Exit(1)


@journal_app.command("list")
def list_(
    context: typer.Context,
    kind: Annotated[str | None, typer.Option(help="Only this kind, such as trajectories or versions.")] = None,
    key: Annotated[str | None, typer.Option(help="Only keys that begin so, such as a task group's name.")] = None,
    number: Annotated[int | None, typer.Option(help="Only the record of this number.", min=1)] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Only records that the run does not use, with the reason.")
    ] = False,
    content: Annotated[bool, typer.Option("--content", help="Also print each record as a line of JSON.")] = False,
    last: Annotated[int, typer.Option(help="How many, counted from the newest.", min=1)] = 20,
    as_json: JsonOption = False,
) -> None:
    """List records: number, kind, key, time of writing, position.

    Kinds: runs, task_groups, assignments, trajectories, failures, verdicts, closed_groups, observations, batches, versions,
    evaluation_starts, evaluations, states, set_aside, collected.
    """
    from services.cli.inspect.journal.listing import list_records, list_set_aside, show_records, show_set_aside

    if set_aside:
        aside = list_set_aside(context.obj, kind=kind, key=key, number=number, last=last)
        if as_json:
            typer.echo(json.dumps({"set_aside": aside}))
        else:
            show_set_aside(aside, console)
        return
    found = list_records(context.obj, kind=kind, key=key, number=number, last=last, content=content)
    if as_json:
        typer.echo(json.dumps({"records": found}))
    else:
        show_records(found, console)


@journal_app.command()
def repair(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the records that would be set aside.")] = False,
) -> None:
    """Rebuild the index from the segments, and set aside for good the records that cannot be used.

    Reads every record. Names damaged and unreadable records in the journal, so that no start reads them again; likewise
    a recorded batch that is lost and whose version was not published: the run then assembles another one. Deletes no
    file. Refused while the run's orchestrator is alive.
    """
    from services.cli.inspect.journal.checks import shown
    from services.cli.inspect.journal.mending import repair_journal

    with shown(console) as advance:
        repaired = repair_journal(context.obj, advance, dry_run=dry_run)
    for noted in repaired:
        place = f"record {noted.number}, {noted.kind}-{noted.segment:06d} at {noted.offset}"
        say(console, f"{noted.reason.value}: {noted.kind} {noted.key} ({place}) {noted.detail}")
    done = "would be set aside; no file has changed" if dry_run else "set aside; the index was made anew"
    say(console, f"{len(repaired)} records {done}")


@journal_app.command()
def compact(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much would be freed.")] = False,
) -> None:
    """Delete trajectories that are not needed any more, and superseded states.

    Needed are all records that are not trained yet, and the batches after the oldest checkpoint in RUN/checkpoints.
    Segments of which less than half is needed are rewritten. `orchestrator.retention: needed` does the same during a
    run. Refused while the run's orchestrator is alive.
    """
    from services.cli.console import format_bytes
    from services.cli.inspect.journal.mending import compact_journal

    found = compact_journal(context.obj, dry_run=dry_run)
    did = "would free" if dry_run else "freed"
    say(
        console,
        f"{did} {format_bytes(found.num_bytes)}: {len(found.removed)} segments deleted, {len(found.rewritten)} rewritten",
    )


@journal_app.command()
def export(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="A directory, made if it is not there.")],
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be repeated.")] = None,
    form: Annotated[
        Literal["jsonl", "parquet"], typer.Option("--format", help="Parquet needs pyarrow (it comes with datasets).")
    ] = "jsonl",
) -> None:
    """Write the records that can be read as plain rows, a file per kind, with token ids and log-probabilities as lists.

    rollmill journal RUN export -o rows --kind trajectories --format parquet
    python -c 'import datasets; print(datasets.load_dataset("rows"))'
    """
    from services.cli.inspect.journal.checks import shown
    from services.cli.inspect.journal.exporting import export_journal

    with shown(console) as advance:
        written = export_journal(context.obj, output, advance, kinds=kind or (), form=form)
    for path, count in written.items():
        say(console, f"{path}: {count:,} rows")

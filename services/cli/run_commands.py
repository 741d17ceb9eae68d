"""Commands that read the directory of a run: plots, trajectories, weight transfers, traces, fates, the doctor, the journal;
and checkpoints: list, export, replay. Extras add commands, such as the page.

Imports stand inside the commands, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.cli.commands import RunArgument, chosen_run
from services.cli.console import console, say

reading_app = typer.Typer()


@reading_app.command()
def plot(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run directories; several are drawn on one picture. Left out: the newest below ./runs."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the PNG; left out, run.png in the run's directory, or runs.png here for several.",
        ),
    ] = None,
) -> None:
    """Draw reward, loss, KL, entropy, gradient norm, lengths, staleness and throughput into a PNG.

    Runs that differ in their seed alone are one curve with a band. Of one run also where the time went, and the fates of its
    rollouts.
    """
    from services.cli.inspect.plot import plot_runs
    from services.common.errors import ConfigError

    runs = runs or [chosen_run(None)]
    target = output or (runs[0] / "run.png" if len(runs) == 1 else Path("runs.png"))
    if output is None and target.is_symlink():  # it may belong to another run and lead anywhere
        raise ConfigError(f"{target} is a link to {target.readlink()}: remove it, or name a file with --output")
    if plot_runs(runs, target) is None:
        raise ConfigError("no training step has finished yet: nothing to draw")
    say(console, str(target))


@reading_app.command()
def trajectories(
    run: RunArgument = None,
    last: Annotated[int, typer.Option(help="How many, counted from the newest.", min=1)] = 5,
    group: Annotated[str | None, typer.Option(help="Only this task group.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task id, or a pattern such as 'add*'.")] = None,
    step: Annotated[int | None, typer.Option(help="Only those in the batch of this training step.", min=1)] = None,
    evaluation: Annotated[
        str | None, typer.Option(help="Only those of this evaluation, such as `end` or `end/greedy`.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards of at most this.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The text of the tokens as they are, special ones included.")
    ] = False,
) -> None:
    """Print conversations of a run with roles, reward and expected answer; turns of the policy are green and have a ».

    Filters may be combined, and then all of them hold. Token ids are decoded with the run's tokenizer; without its files
    they are shown as numbers.

        rollmill trajectories RUN --step 40 --max-reward 0
        rollmill trajectories RUN --evaluation end --task 'add*'
    """
    from services.cli.inspect.trajectories import Wanted, read_trajectories, show

    wanted = Wanted(last, group, task, step, evaluation, min_reward, max_reward)
    found = chosen_run(run)
    rows = read_trajectories(found, wanted)
    if not rows:
        say(console, "no trajectory matches: `rollmill trace RUN --list` shows task groups")
    show(found, rows, console, raw=raw)


@reading_app.command()
def weights(
    run: RunArgument = None,
    last: Annotated[int, typer.Option(help="How many transfers to list, counted from the newest.", min=1)] = 10,
    policy: Annotated[str | None, typer.Option(help="Only this policy.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only this replica.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary and every transfer as JSON.")] = False,
) -> None:
    """How weight versions reached the replicas: full or delta, bytes, bits per changed element, seconds per stage, pause."""
    from services.cli.inspect.standing import read_transfers, show, summarise

    run = chosen_run(run)
    rows = read_transfers(run, policy=policy, replica=replica)
    if as_json:
        typer.echo(json.dumps({"replicas": summarise(rows), "transfers": [one.row for one in rows]}))
    else:
        show(rows, console, last)


@reading_app.command()
def trace(
    run: RunArgument = None,
    group: Annotated[str | None, typer.Argument(help="A task group, as --list shows them.")] = None,
    phases: Annotated[bool, typer.Option("--phases", help="Also every phase of every rollout.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write it to this file, as an SVG.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List task groups instead, the newest last.")] = False,
    order: Annotated[Literal["newest", "slowest"], typer.Option("--sort", help="The order of --list.")] = "newest",
    state: Annotated[
        str | None, typer.Option("--status", help="Of --list, only these, e.g. trained, filtered, failed, running.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="With --list: only groups trained in this step.", min=0)] = None,
    last: Annotated[int, typer.Option(help="How many to list.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the life of a task group from the prompt to the gradient: its replicas, its phases, its waits.

    Needs the run directory only: during the run, after its end, and after any process was killed.
    """
    from services.cli.inspect.trace import list_groups, show_group
    from services.common.errors import ConfigError

    if run is not None and group is None and not list_ and "/" not in str(run) and not run.exists():
        run, group = None, str(run)  # `rollmill trace GROUP`
    run = chosen_run(run)
    if list_ or group is None:
        if output is not None:
            raise ConfigError("name the task group to draw: rollmill trace RUN GROUP -o FILE.svg")
        list_groups(run, console, order=order, state=state, step=step, last=last, as_json=as_json)
    else:
        show_group(run, group, console, phases=phases, output=output, as_json=as_json)


@reading_app.command()
def fate(
    run: RunArgument = None,
    policy: Annotated[str | None, typer.Option(help="Only this policy.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Only groups issued while the policy was at this training step.", min=1)
    ] = None,
    last: Annotated[int, typer.Option(help="How many steps to list, counted from the newest.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Count the rollouts of a run by outcome: trained, masked, dropped and why, lost, or still in flight.

    Every task group, rollout, sequence and sampled token has one fate; the sums are checked against the number that was
    issued. *dropped: equal rewards* is `batch.dynamic_sampling`; *too old* is `batch.late` and `batch.max_staleness`;
    *timed out* is `rollout.timeout_s`. A step is the one that the policy was at when the task group was issued. The
    table of lengths tells whether long responses are trained as often as short ones: a length bias of 1 is none.

    Needs the run directory only: during the run, after its end, and after any process was killed. Evaluations are left
    out. `rollmill trace RUN GROUP` follows a single task group; `rollmill plot` draws the same shares.

        rollmill fate RUN
        rollmill fate RUN --step 40
        rollmill fate RUN --json | jq '.policies.model0.lengths'
    """
    from services.cli.inspect.fate import tell_fates

    run = chosen_run(run)
    tell_fates(run, console, policy=policy, step=step, last=last, as_object=as_json)


@reading_app.command()
def doctor(
    run: RunArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object.")] = False,
) -> None:
    """Say whether a run has learned, and name the failures that its metrics show, each with evidence and a setting to try.

    Reads the records until now, and makes no prediction. Exit code 1 when there is a finding. Needs the run directory
    only: during the run, after its end, and after any process was killed. docs/doctor.md has the rules.
    """
    from services.cli.doctor import as_object, examine, tell

    verdict = examine(chosen_run(run))
    if as_json:
        typer.echo(json.dumps(as_object(verdict)))
    else:
        tell(verdict, console)
        if not verdict.findings:
            say(console, "no failure found")
    if verdict.findings:
        raise typer.Exit(1)


results_app = typer.Typer()


@results_app.command()
def checkpoints(
    run: RunArgument = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with its digest; else only sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """The checkpoints of a run: step, size, age, whether each is whole, and whether the run can resume there.

    A run can resume from a checkpoint when the journal still has all later batches. A trainer verifies the newest
    checkpoint before loading; a damaged one is renamed to `step_….damaged`, and the trainer takes the previous one.
    Such ones stay, and are listed, until they are removed by hand: their weights may be whole and can then be exported.

    Needs the run directory only: during the run, after its end, and after any process was killed. Ends with exit code 1
    when a checkpoint is damaged.

        rollmill checkpoints RUN
        rollmill checkpoints RUN --verify
        rollmill checkpoints RUN --json | jq '.checkpoints[] | select(.damaged)'
    """
    from services.cli.inspect.checkpoints import tell_checkpoints

    run = chosen_run(run)
    if not tell_checkpoints(run, console, verify=verify, as_object=as_json):
        raise typer.Exit(1)


@results_app.command()
def export(
    run: RunArgument = None,
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
    step: Annotated[
        int | None,
        typer.Option(help="The training step, as `rollmill checkpoints` lists them; left out, the newest.", min=1),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it; left out, RUN/export/POLICY-STEP.")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter/--merged", help="An adapter as a directory that PEFT loads, or merged into its base."),
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Directory of an adapter's base; left out, where the run read it.")
    ] = None,
) -> None:
    """Make a Hugging Face directory of a checkpoint: config, tokenizer and safetensors that transformers loads.

    From any checkpoint that is kept, of a running, finished or broken run: no process of the run is needed, no GPU, and
    little memory, because weights are copied piece by piece. They are verified first, and cast to the type in which the
    run publishes versions (`weights.publish_dtype`). A value head is left out. `rollmill_export.json` says which run, step
    and checkpoint it is of.

    An adapter (`policies.NAME.adapter`) is merged into its base, which is compared with the digests of the run; with
    --adapter it stays apart, in PEFT's format.

        rollmill export RUN
        rollmill export RUN --policy model0 --step 40 -o models/at-40
        rollmill export RUN --adapter
    """
    from services.cli.console import format_bytes
    from services.cli.inspect.checkpoints import export_run
    from services.common.export import ExportForm

    run = chosen_run(run)
    form = ExportForm.ADAPTER if adapter else ExportForm.MERGED
    done = export_run(run, policy, step, output, form, base)
    told = (
        f"{done.directory}: {done.policy} at step {done.training_step}, {done.dtype}, {format_bytes(done.size_bytes)}"
    )
    say(console, told)


@results_app.command()
def replay(
    step: Annotated[int, typer.Option(help="The training step to train again.", min=1)],
    run: RunArgument = None,
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
) -> None:
    """Train a recorded batch again, offline, from the checkpoint before the batch, and compare the weights with the
    ledger."""
    from services.cli.inspect.checkpoints import replay_step

    run, progress = chosen_run(run), Console(stderr=True)  # the JSON alone goes to standard output
    console.print_json(json.dumps(replay_step(run, policy, step, lambda text: say(progress, text))))


journal_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", subcommand_metavar="COMMAND")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@journal_app.callback(invoke_without_command=True)
def journal(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000.")],
) -> None:
    """List, verify and export the journal of a run.

    The journal is RUN/journal: everything that the orchestrator has acknowledged, in segments of compressed JSON lines, and an
    index of them. RUN may be running, stopped or broken: these commands only read.

        rollmill journal RUN verify              read every record, compare its checksum; exit code 1 when one is damaged
        rollmill journal RUN list --set-aside    records that the run does not use, and why
        rollmill journal RUN list --kind versions --last 5
        rollmill journal RUN export -o rows      JSON lines, that `datasets` opens

    The orchestrator sets a damaged record aside when it starts, logs it, and continues. docs/journal.md describes the effect of
    losing each kind of record.
    """
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
    from services.cli.inspect.journal import as_object, show_verified, verify_journal

    found = verify_journal(context.obj, None if as_json else console)
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
    evaluation_starts, evaluations, states, set_aside.
    """
    from services.cli.inspect.journal import list_records, list_set_aside, show_records

    if set_aside:
        found = list_set_aside(context.obj, kind=kind, key=key, number=number, last=last)
    else:
        found = list_records(context.obj, kind=kind, key=key, number=number, last=last, content=content)
    if as_json:
        typer.echo(json.dumps({"set_aside" if set_aside else "records": found}))
    else:
        show_records(found, console)


@journal_app.command("export")
def export_records(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="A directory, made if it is not there.")],
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be repeated.")] = None,
) -> None:
    """Write the records that can be read as plain rows, a file per kind, with token ids and log-probabilities as lists.

    rollmill journal RUN export -o rows --kind trajectories
    python -c 'import datasets; print(datasets.load_dataset("rows"))'
    """
    from services.cli.inspect.journal import export_journal

    written = export_journal(context.obj, output, console, kinds=kind or ())
    for path, count in written.items():
        say(console, f"{path}: {count:,} rows")

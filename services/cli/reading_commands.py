"""Commands that read what a run has written: pictures, trajectories, weight transfers, traces, a step trained again.

What a command needs is imported when it runs: ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.options import console

reading_app = typer.Typer()

RunArgument = Annotated[Path, typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000.")]


@reading_app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are drawn on one picture.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the PNG; left out, run.png in the run's directory, or runs.png here for several.",
        ),
    ] = None,
) -> None:
    """Draw rewards, response length, staleness, throughput, idle shares and (of one run) fates of rollouts into a PNG."""
    from services.cli.plot import plot_runs
    from services.common.errors import ConfigError

    target = output or (runs[0] / "run.png" if len(runs) == 1 else Path("runs.png"))
    if output is None and target.is_symlink():  # perhaps of somebody else's run, and leads anywhere
        raise ConfigError(f"{target} is a link to {target.readlink()}: remove it, or name a file with --output")
    if plot_runs(runs, target) is None:
        raise ConfigError("no training step has finished yet: nothing to draw")
    console.print(str(target), highlight=False, soft_wrap=True)


@reading_app.command()
def trajectories(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many, counted from the newest.", min=1)] = 5,
    group: Annotated[str | None, typer.Option(help="Only this task group.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards of at most this.")] = None,
) -> None:
    """Read real conversations: what the policy wrote in green, what it read in grey."""
    from services.cli.trajectories import read_trajectories, show

    rows = read_trajectories(run, last=last, group=group, min_reward=min_reward, max_reward=max_reward)
    if not rows:
        console.print("no trajectory matches: `millrace trace RUN --list` shows task groups", markup=False)
    show(run, rows, console)


@reading_app.command()
def weights(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many transfers to list, counted from the newest.", min=1)] = 10,
    policy: Annotated[str | None, typer.Option(help="Only this policy.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only this replica.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw them into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary and every transfer as JSON.")] = False,
) -> None:
    """How weight versions reached the replicas: full or delta, bytes, bits per changed element, seconds per stage, pause."""
    from services.cli.weights import plot_transfers, read_transfers, show, summarise

    rows = read_transfers(run, policy=policy, replica=replica)
    if as_json:
        typer.echo(json.dumps({"replicas": summarise(rows), "transfers": rows}))
    else:
        show(rows, console, last)
    if output is not None:
        picture = plot_transfers(rows, output)
        if not as_json:
            console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


@reading_app.command()
def trace(
    run: RunArgument,
    group: Annotated[str | None, typer.Argument(help="A task group, as --list shows them.")] = None,
    phases: Annotated[bool, typer.Option("--phases", help="Also every phase of every rollout.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it into this PNG.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List task groups instead, the newest last.")] = False,
    order: Annotated[Literal["newest", "slowest"], typer.Option("--sort", help="The order of --list.")] = "newest",
    state: Annotated[
        str | None, typer.Option("--status", help="Of --list, only these, e.g. trained, filtered, failed, running.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of --list, only what was trained in this step.", min=0)] = None,
    last: Annotated[int, typer.Option(help="How many to list.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What happened to a task group, from the prompt to the gradient: who had it when, what it did, what it waited for.

    Needs the run directory alone: while the run goes on, after it, and after any of its processes was killed.
    """
    from services.cli.trace.command import list_groups, show_group
    from services.common.errors import ConfigError

    if list_ or group is None:
        if output is not None:
            raise ConfigError("name the task group to draw: millrace trace RUN GROUP -o FILE.png")
        list_groups(run, console, order=order, state=state, step=step, last=last, as_json=as_json)
    else:
        show_group(run, group, console, phases=phases, output=output, as_json=as_json)


@reading_app.command()
def fate(
    run: RunArgument,
    policy: Annotated[str | None, typer.Option(help="Only this policy.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Only what was issued while the policy was at this training step.", min=1)
    ] = None,
    last: Annotated[int, typer.Option(help="How many steps to list, counted from the newest.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Where the rollouts of a run went: how much was trained, masked, dropped and why, lost, or is still in flight.

    Every task group, rollout, sequence and sampled token has one fate; they are added up and checked against what was
    issued. *dropped: equal rewards* is `batch.dynamic_sampling`; *too old* is `batch.late` and `batch.max_staleness`;
    *timed out* is `rollout.timeout_s`. A step is the one that the policy was at when the task group was issued. The table
    of lengths tells whether long responses are trained as often as short ones: a length bias of 1 is none.

    Needs the run directory alone: while the run goes on, after it, and after any of its processes was killed. Evaluations
    are left out. `millrace trace RUN GROUP` follows a single task group; `millrace plot` draws the same shares.

        millrace fate RUN
        millrace fate RUN --step 40
        millrace fate RUN --json | jq '.policies.model0.lengths'
    """
    from services.cli.fate.command import tell_fates

    tell_fates(run, console, policy=policy, step=step, last=last, as_object=as_json)


@reading_app.command()
def checkpoints(
    run: RunArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with its digest; else only sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """The checkpoints of a run: step, size, age, whether each is whole, and whether the run can go on from it.

    A run goes on from a checkpoint when the journal still has the batches that were trained after it. A trainer verifies
    the newest before it loads it; where that is damaged, it renames it to `step_….damaged` and takes the one before. Such
    ones stay, and are listed, until they are removed by hand: their weights may be whole and can then be exported.

    Needs the run directory alone: while the run goes on, after it, and after any of its processes was killed. Ends with
    exit code 1 when something is damaged.

        millrace checkpoints RUN
        millrace checkpoints RUN --verify
        millrace checkpoints RUN --json | jq '.checkpoints[] | select(.damaged)'
    """
    from services.cli.checkpoints.command import tell_checkpoints

    if not tell_checkpoints(run, console, verify=verify, as_object=as_json):
        raise typer.Exit(1)


@reading_app.command()
def export(
    run: RunArgument,
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
    step: Annotated[
        int | None,
        typer.Option(help="The training step, as `millrace checkpoints` lists them; left out, the newest.", min=1),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write it; left out, RUN/export/POLICY-STEP."),
    ] = None,
) -> None:
    """Make a Hugging Face directory of a checkpoint: config, tokenizer and safetensors that transformers loads.

    From any checkpoint that is kept, of a running, finished or broken run: no process of the run is needed, no GPU, and
    little memory, because weights are copied piece by piece. They are verified first, and cast to the type in which the
    run publishes versions (`weights.publish_dtype`). A value head is left out. `millrace_export.json` says which run, step
    and checkpoint it is of.

        millrace export RUN
        millrace export RUN --policy model0 --step 40 -o models/at-40
    """
    from services.cli.checkpoints.command import export_run
    from services.cli.units import format_bytes

    done = export_run(run, policy, step, output)
    told = (
        f"{done.directory}: {done.policy} at step {done.training_step}, {done.dtype}, {format_bytes(done.size_bytes)}"
    )
    console.print(told, highlight=False, soft_wrap=True, markup=False)


@reading_app.command()
def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option(help="The training step to train again.", min=1)],
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
) -> None:
    """Train a recorded batch again, offline, from the checkpoint before it, and compare the weights with the ledger."""
    from services.cli.replay import replay_step

    console.print_json(json.dumps(replay_step(run, policy, step)))

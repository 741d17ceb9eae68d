"""Commands about the checkpoints of a run: list, export, push, and replay of a step.

Imports stand inside the commands, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.commands.chosen import RunArgument, chosen_run
from services.cli.console import console, say

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
    from services.cli.inspect.checkpoints.command import tell_checkpoints

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
        Path | None,
        typer.Option("--output", "-o", help="Where to write it; left out, RUN/export/POLICY-STEP."),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter/--merged", help="An adapter as a directory that PEFT loads, or merged into its base."),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(help="Directory of an adapter's base; left out, where the run read it."),
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
    from services.cli.inspect.checkpoints.command import export_run
    from services.common.checkpoints.adapters import ExportForm

    run = chosen_run(run)
    form = ExportForm.ADAPTER if adapter else ExportForm.MERGED
    done = export_run(run, policy, step, output, form, base)
    told = (
        f"{done.directory}: {done.policy} at step {done.training_step}, {done.dtype}, {format_bytes(done.size_bytes)}"
    )
    say(console, told)


@results_app.command()
def push(
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; it is made when it is not there.")],
    run: RunArgument = None,
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
    step: Annotated[int | None, typer.Option(help="The training step; left out, the newest.", min=1)] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Of a repository that is made.")] = True,
) -> None:
    """Export a checkpoint and upload it to a model hub, with a card of the measured results.

    HF_TOKEN or `hf auth login` gives the key, HF_ENDPOINT another hub. The export stays in the run's directory, so the
    command can be repeated.

        rollmill push me/my-model RUN
    """
    from services.cli.inspect.checkpoints.push import push_run

    done = push_run(chosen_run(run), repository, policy, step, private=private)
    say(console, f"{done.policy} at step {done.step} is at {done.url}")


@results_app.command()
def replay(
    step: Annotated[int, typer.Option(help="The training step to train again.", min=1)],
    run: RunArgument = None,
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
) -> None:
    """Train a recorded batch again, offline, from the checkpoint before the batch, and compare the weights with the
    ledger."""
    from services.cli.inspect.replay import replay_step

    run, progress = chosen_run(run), Console(stderr=True)  # the JSON alone goes to standard output
    console.print_json(json.dumps(replay_step(run, policy, step, lambda text: say(progress, text))))

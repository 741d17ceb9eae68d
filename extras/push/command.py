"""The command ``rollmill push``. The upload is imported when the command is called, so that ``--help`` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands import RunArgument, chosen_run
from services.cli.console import console, say


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
    from extras.push.hub import push_run

    done = push_run(chosen_run(run), repository, policy, step, private=private)
    say(console, f"{done.policy} at step {done.step} is at {done.url}")

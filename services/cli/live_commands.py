"""Commands to a run that goes on: where it stands, and its pause and stop.

What a command needs is imported when it runs: ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import console
from services.common.hosts import ORCHESTRATOR

live_app = typer.Typer()

RunningArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The run's directory, which knows the address and has the keys, if the run has any. Left out: --orchestrator.",
    ),
]
RunOption = Annotated[Path | None, typer.Option("--run", hidden=True, help="The same as the argument RUN.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--orchestrator", help="Instead of RUN: the orchestrator's HOST:PORT.", show_default=ORCHESTRATOR),
]


@live_app.command()
def status(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Where a run stands now."""
    from services.cli.progress_view import render
    from services.cli.reach import reach

    answer = reach(run or named, address).get_run()
    console.print(render(answer.progress, title=answer.run_id))
    console.print(f"run directory: {answer.run_dir}", highlight=False, soft_wrap=True)


@live_app.command()
def watch(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Follow a run until it ends; Ctrl-C stops watching, not the run."""
    from services.cli.follow import follow
    from services.cli.progress_view import ProgressView
    from services.cli.reach import reach

    client = reach(run or named, address)
    with ProgressView(console, client.get_run().run_id) as view:
        follow(client, view)


@live_app.command()
def pause(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Issue no further tasks and start no further training step, until `millrace resume`."""
    from services.cli.reach import reach

    reach(run or named, address).pause()
    console.print("paused; go on with `millrace resume`")


@live_app.command()
def resume(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Go on after `millrace pause`. A run whose processes have ended goes on with `millrace run --resume RUN`."""
    from services.cli.reach import reach

    reach(run or named, address).resume()
    console.print("going on")


@live_app.command()
def stop(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """End a run for good: trainers write a checkpoint and leave, replicas finish what they play.

    To go on with it later, stop `millrace run` with Ctrl-C instead, then `millrace run --resume RUN`.
    """
    from services.cli.reach import reach

    reach(run or named, address).stop("millrace stop")
    console.print("stopping")

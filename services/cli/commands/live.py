"""Commands to a run in progress: status, watch, pause, resume, stop.

Imports stand inside the commands, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.console import console, say
from services.common.net.hosts import ORCHESTRATOR

if TYPE_CHECKING:
    from services.cli.watch.orchestrator_client import OrchestratorClient

live_app = typer.Typer()

RunningArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The run's directory, which knows the address and has the keys, if the run has any. Left out: the newest below "
        "./runs, else --orchestrator.",
    ),
]
RunOption = Annotated[Path | None, typer.Option("--run", hidden=True, help="The same as the argument RUN.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--orchestrator", help="Instead of RUN: the orchestrator's HOST:PORT.", show_default=ORCHESTRATOR),
]


@live_app.command()
def status(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Show the state of a run (running, finished, stopped or interrupted) and the command that goes on with the run."""
    from services.cli.inspect.standing import COMMAND, standing
    from services.cli.watch.orchestrator_client import check_answers, chosen, reach
    from services.cli.watch.progress_view import render
    from services.common.errors import InfrastructureError

    run = chosen(run or named, address)
    client = reach(run, address)
    try:
        answer = check_answers(client, run) if run is not None else client.get_run()
    except InfrastructureError as error:
        if run is None:
            raise
        found = standing(run)
        for line in found.lines():
            say(console, line, wrap=line.startswith("  ") and not line.startswith(COMMAND))
        if found.held_by:
            say(console, f"  its orchestrator does not answer: {error.message}", "yellow")
        return
    console.print(render(answer.progress, title=answer.run_id))
    say(console, f"run directory: {answer.run_dir}")


@live_app.command()
def watch(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Follow a run until its end; Ctrl-C stops watching, not the run."""
    from services.cli.watch.notices import follow
    from services.cli.watch.orchestrator_client import chosen, reach
    from services.cli.watch.progress_view import ProgressView

    client = reach(chosen(run or named, address), address)
    with ProgressView(console, client.get_run().run_id) as view:
        follow(client, view)


@live_app.command()
def pause(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Issue no further tasks and start no further training step, until `rollmill resume`."""
    _client(run or named, address).pause()
    console.print("paused; go on with `rollmill resume`")


@live_app.command()
def resume(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Continue after `rollmill pause`. To continue a run whose processes have ended, use `rollmill run --resume RUN`."""
    _client(run or named, address).resume()
    console.print("going on")


@live_app.command()
def stop(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """End a run for good: trainers write a checkpoint and exit, replicas finish their rollouts.

    To continue the run later, stop `rollmill run` with Ctrl-C instead, then use `rollmill run --resume RUN`.
    """
    from services.cli.inspect.standing import RUNNING, standing
    from services.cli.watch.orchestrator_client import chosen
    from services.common.errors import InfrastructureError

    run = chosen(run or named, address)
    try:
        _client(run, address).stop("rollmill stop")
    except InfrastructureError:
        if run is None or (found := standing(run)).state == RUNNING:
            raise
        say(console, "nothing to stop: " + "\n".join(found.lines()))
        return
    console.print("stopping")


def _client(run: Path | None, address: str | None) -> OrchestratorClient:
    """The orchestrator of the run that is named, of the newest one, or at an address; never that of another run."""
    from services.cli.watch.orchestrator_client import check_answers, chosen, reach

    run = chosen(run, address)
    client = reach(run, address)
    if run is not None:
        check_answers(client, run)
    return client

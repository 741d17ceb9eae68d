"""Commands to a run that goes on: where it stands, and its pause and stop.

What a command needs is imported when it runs: ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import console

live_app = typer.Typer()

AddressOption = Annotated[str, typer.Option("--orchestrator", help="Address of the orchestrator.")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="Instead of the address: the run's directory, which also has its keys, if it has any."),
]
DEFAULT_ADDRESS = "127.0.0.1:50050"


@live_app.command()
def status(address: AddressOption = DEFAULT_ADDRESS, run: RunOption = None) -> None:
    """Where a run stands now."""
    from services.cli.progress_view import render
    from services.cli.reach import reach

    answer = reach(address, run).get_run()
    console.print(render(answer.progress, title=answer.run_id))
    console.print(f"run directory: {answer.run_dir}", highlight=False, soft_wrap=True)


@live_app.command()
def watch(address: AddressOption = DEFAULT_ADDRESS, run: RunOption = None) -> None:
    """Follow a run until it ends; Ctrl-C stops watching, not the run."""
    from services.cli.follow import follow
    from services.cli.progress_view import ProgressView
    from services.cli.reach import reach

    client = reach(address, run)
    with ProgressView(console, client.get_run().run_id) as view:
        follow(client, view)


@live_app.command()
def pause(address: AddressOption = DEFAULT_ADDRESS, run: RunOption = None) -> None:
    """Issue no further tasks and start no further training step, until `millrace resume`."""
    from services.cli.reach import reach

    reach(address, run).pause()
    console.print("paused; go on with `millrace resume`")


@live_app.command()
def resume(address: AddressOption = DEFAULT_ADDRESS, run: RunOption = None) -> None:
    """Go on after `millrace pause`."""
    from services.cli.reach import reach

    reach(address, run).resume()
    console.print("going on")


@live_app.command()
def stop(address: AddressOption = DEFAULT_ADDRESS, run: RunOption = None) -> None:
    """End a run: trainers write a checkpoint and leave, replicas finish what they play."""
    from services.cli.reach import reach

    reach(address, run).stop("millrace stop")
    console.print("stopping")

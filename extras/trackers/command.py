"""The command ``rollmill track``."""

from __future__ import annotations

import threading

from services.cli.commands import RunArgument, chosen_run
from services.cli.console import console, say


def track(run: RunArgument = None) -> None:
    """Send what the trackers of a run have not taken: after a tracker was down, or its package was missing.

    Rows that a tracker has are not sent again; `run.trackers` of the run says which trackers there are.
    """
    from services.cli.inspect.run_state import check_run_directory
    from services.common.errors import ConfigError, InfrastructureError
    from services.common.extras import load_extra, provided
    from services.orchestrator.trackers import read_position

    run = chosen_run(run)
    check_run_directory(run)
    now = threading.Event()
    now.set()
    sent: dict[str, bool] = {}
    for tracker in {path: tracker for tracker, path in provided("trackers").items()}.values():  # one of each extra
        sent |= load_extra("trackers", tracker)(run, now)
    if not sent:
        raise ConfigError(
            f"{run} has no tracker to send to: its run.trackers names none but tensorboard, whose files it has"
        )
    for tracker, complete in sent.items():
        if complete:
            say(console, f"{tracker}: all {read_position(run, tracker).num_rows} rows sent")
    if waiting := [tracker for tracker, complete in sent.items() if not complete]:
        errors = "; ".join(
            f"{tracker}: {read_position(run, tracker).error or 'the log above says why'}" for tracker in waiting
        )
        raise InfrastructureError(f"not all rows were taken ({errors}): they are kept, run this again later")

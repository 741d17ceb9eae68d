"""``millrace watch``: shows a run until its end, and reports an orchestrator that does not answer."""

from __future__ import annotations

import time

import structlog

from services.cli.watch.notices import OrchestratorLiveness
from services.cli.watch.orchestrator_client import OrchestratorClient
from services.cli.watch.progress_view import ProgressView
from services.common.errors import InfrastructureError
from services.common.pb import run_pb2

log = structlog.get_logger()

EVERY_S = 1.0
PATIENCE_S = 300.0  # for an orchestrator that is away: it may be started again


def follow(client: OrchestratorClient, view: ProgressView) -> None:
    """Poll about once a second, each call with a deadline: a stream could end without notice when its peer dies.

    Raises ``InfrastructureError`` when the orchestrator has not answered for five minutes.
    """
    liveness = OrchestratorLiveness(client.address)
    heard_at = time.monotonic()
    while True:
        try:
            if show_now(client, view, liveness):
                return
            heard_at = time.monotonic()
        except InfrastructureError:
            if time.monotonic() - heard_at > PATIENCE_S:
                raise
        time.sleep(EVERY_S)


def show_now(client: OrchestratorClient, view: ProgressView, liveness: OrchestratorLiveness) -> bool:
    """Show the present state of the run; returns whether the run has ended.

    Raises ``InfrastructureError`` when the orchestrator does not answer, which the view reports once it lasts.
    """
    try:
        progress = client.get_run().progress
    except InfrastructureError as error:
        log.debug("orchestrator.silent", error=error.message)  # being restarted, or leaving
        liveness.missed()
        if (stall := liveness.stall) is not None:
            view.silent(stall)
        raise
    liveness.answered()
    view.show(progress)
    return progress.state in (run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_STOPPED)

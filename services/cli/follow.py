"""``millrace watch``: shows a run until it ends, and says so when the orchestrator itself does not answer."""

from __future__ import annotations

import time

import structlog

from services.cli.orchestrator_client import OrchestratorClient
from services.cli.progress_view import ProgressView, state_word
from services.cli.silence import Silence
from services.common.errors import InfrastructureError

log = structlog.get_logger()

EVERY_S = 1.0
PATIENCE_S = 300.0  # for an orchestrator that is away: it may be started again


def follow(client: OrchestratorClient, view: ProgressView) -> None:
    """Ask about once a second, each time with a deadline: a stream would end as silently as its peer.

    Raises ``InfrastructureError`` when nobody has answered for five minutes.
    """
    silence = Silence(client.address)
    heard_at = time.monotonic()
    while True:
        try:
            if show_now(client, view, silence):
                return
            heard_at = time.monotonic()
        except InfrastructureError:
            if time.monotonic() - heard_at > PATIENCE_S:
                raise
        time.sleep(EVERY_S)


def show_now(client: OrchestratorClient, view: ProgressView, silence: Silence) -> bool:
    """Show the run as it is; whether it has ended.

    Raises ``InfrastructureError`` when nobody answers, which the view tells once it lasts.
    """
    try:
        progress = client.get_run().progress
    except InfrastructureError as error:
        log.debug("orchestrator.silent", error=error.message)  # being restarted, or leaving
        silence.missed()
        if (stall := silence.stall) is not None:
            view.silent(stall)
        raise
    silence.answered()
    view.show(progress)
    return state_word(progress.state) in ("finished", "stopped")

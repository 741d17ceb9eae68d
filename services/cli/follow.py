"""``millrace watch``: shows a run until it ends, and says so when the orchestrator itself does not answer."""

from __future__ import annotations

import time

from services.cli.orchestrator_client import OrchestratorClient
from services.cli.progress_view import ProgressView, state_word
from services.cli.silence import Silence
from services.common.errors import InfrastructureError

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
            progress = client.get_run().progress
        except InfrastructureError:
            silence.missed()
            if time.monotonic() - heard_at > PATIENCE_S:
                raise
            if (stall := silence.stall) is not None:
                view.silent(stall)
        else:
            heard_at = time.monotonic()
            silence.answered()
            view.show(progress)
            if state_word(progress.state) in ("finished", "stopped"):
                return
        time.sleep(EVERY_S)

"""Reports stalls while a run starts: with a full disk the run never becomes ready, and only the orchestrator knows the
reason."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.cli.watch.orchestrator_client import OrchestratorClient
from services.cli.watch.progress_view import StallsTold
from services.common.errors import InfrastructureError

ASK_EVERY_S = 5.0


class StallsAtStart:
    """Polls the orchestrator at intervals, as soon as its process can run, and reports its stalls."""

    def __init__(
        self, client: OrchestratorClient, told: StallsTold, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._told = told
        self._clock = clock
        self._ask_at = clock() + ASK_EVERY_S

    def __call__(self) -> None:
        if self._clock() < self._ask_at:
            return
        try:
            stalls = self._client.get_run().progress.stalls
        except InfrastructureError:
            pass  # not up yet: the launcher's own deadline names it
        else:
            self._told.tell(stalls)
        self._ask_at = self._clock() + ASK_EVERY_S

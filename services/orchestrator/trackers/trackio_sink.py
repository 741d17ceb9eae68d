"""Trackio: a local database that ``trackio show`` displays. TRACKIO_DIR, TRACKIO_SERVER_URL and TRACKIO_SPACE_ID choose
another place."""

from __future__ import annotations

import os
from collections.abc import Sequence

from services.orchestrator.metrics.scalars import scalars_of
from services.orchestrator.trackers.sink import Row, RunFacts, TrackerDown


class TrackioSink:
    def __init__(self, facts: RunFacts) -> None:
        """Raises ``TrackerDown`` when a server is named and does not answer, or the directory cannot be written."""
        import httpx
        import trackio

        self._down = (OSError, ConnectionError, httpx.HTTPError)
        try:
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or facts.project,
                name=facts.run_id,
                resume="allow",
                config=dict(facts.settings),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except self._down as error:
            raise TrackerDown(f"{type(error).__name__}: {error}") from error

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (scalars := scalars_of(row)) is not None:
                self._run.log(scalars.tagged, step=scalars.step)

    def close(self) -> None:
        try:
            self._run.finish()
        except self._down as error:
            raise TrackerDown(f"{type(error).__name__}: {error}") from error

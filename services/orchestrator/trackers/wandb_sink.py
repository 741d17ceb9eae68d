"""Weights & Biases. Online with a key (WANDB_API_KEY, or ``wandb login``), else offline in ``RUN/trackers/launch-N``.

A resumed run has the same W&B id, so its curves go on. Offline, each launch leaves one directory; ``wandb sync`` sends them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from services.orchestrator.metrics.scalars import scalars_of
from services.orchestrator.trackers.sink import Row, RunFacts, TrackerDown

INIT_TIMEOUT_S = 30


class WandbSink:
    def __init__(self, facts: RunFacts) -> None:
        """Raises ``TrackerDown`` when the server does not answer."""
        import wandb

        # One for each launch: W&B names directories by the second, and a second run of that name replaces the first.
        folder = facts.directory / f"launch-{1 + len(list(facts.directory.glob('launch-*')))}"
        folder.mkdir(parents=True)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True,
            init_timeout=INIT_TIMEOUT_S,
        )  # fmt: skip
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or facts.project,
                id=_id(facts.run_id),
                name=facts.run_id,
                resume="allow",
                dir=str(folder),
                mode=_mode(wandb),
                config=dict(facts.settings),
                settings=settings,
            )
        except wandb.Error as error:
            raise TrackerDown(str(error)) from error
        self._groups: set[str] = set()

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (scalars := scalars_of(row)) is None:
                continue
            step = f"{scalars.group}/step"
            if scalars.group not in self._groups:
                self._groups.add(scalars.group)
                # Groups have steps of their own: W&B's one counter is no axis of theirs.
                self._run.define_metric(step, hidden=True)
                self._run.define_metric(f"{scalars.group}/*", step_metric=step)
            self._run.log({**scalars.tagged, step: scalars.step, "_timestamp": scalars.time_s})

    def close(self) -> None:
        self._run.finish()


def _mode(wandb: Any) -> Any:  # W&B checks a mode of the user's
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if wandb.api.api_key else "offline"


def _id(run_id: str) -> str:
    """W&B refuses some characters in ids, and ids beyond 64 characters."""
    return re.sub(r"[^\w-]", "-", run_id)[:64]

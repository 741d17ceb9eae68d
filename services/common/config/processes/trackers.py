"""The trackers that a run can send its metrics to, and the package that each needs."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from services.common.installing import install, missing


class Tracker(enum.StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    OTLP = "otlp"


def missing_packages(trackers: Iterable[Tracker]) -> list[str]:
    """One line for each tracker whose package is not installed, with the command that installs it."""
    return [
        f"run.trackers has {tracker}, whose package is not installed here: {install(tracker)}, or leave {tracker} out"
        for tracker in trackers
        if tracker is not Tracker.TENSORBOARD and missing(tracker)  # whose files Rollmill writes itself
    ]

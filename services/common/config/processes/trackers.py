"""The trackers that a run can send its metrics to, and the package that each needs."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Iterable

from services.common.installing import install


class Tracker(enum.StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    OTLP = "otlp"

    @property
    def module(self) -> str | None:
        """The module that must be importable; None for TensorBoard, whose files Rollmill writes itself."""
        return _MODULES[self]


_MODULES = {
    Tracker.TENSORBOARD: None,
    Tracker.WANDB: "wandb",
    Tracker.TRACKIO: "trackio",
    Tracker.OTLP: "opentelemetry.exporter.otlp.proto.grpc",
}


def missing_packages(trackers: Iterable[Tracker]) -> list[str]:
    """One line for each tracker whose package is not installed, with the command that installs it."""
    return [
        f"run.trackers has {tracker}, whose package is not installed here: {install(tracker)}, or leave {tracker} out"
        for tracker in trackers
        if tracker.module is not None and not _is_installed(tracker.module)
    ]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package
        return False

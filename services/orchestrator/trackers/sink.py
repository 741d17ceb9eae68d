"""The interface of a tracker. A sink is used by one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


class TrackerDown(Exception):
    """A tracker cannot be reached, or did not take the rows that were sent: the same rows are sent again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What trackers show of a run beside its numbers."""

    run_id: str
    project: str
    """Name of the recipe: runs of one recipe are compared with each other."""
    directory: Path
    """The run's directory of trackers."""
    settings: Mapping[str, Any]
    """The resolved recipe, without passwords."""


class Sink(Protocol):
    def send(self, rows: Sequence[Row]) -> None:
        """Send rows of the run's metrics, in order; called again with the same rows after ``TrackerDown``."""

    def close(self) -> None:
        """Hand over what is buffered. Raises ``TrackerDown`` when that is impossible."""

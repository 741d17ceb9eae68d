"""Prints one line when a tracker stops taking rows, one when the tracker takes rows again, and the unsent rows at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from services.cli.console.plain import say
from services.common.config.recipe import Recipe
from services.orchestrator.trackers.follower import all_sent, read_position
from services.orchestrator.trackers.process import followed

EVERY_S = 5.0


class TrackersTold:
    """Reads the positions of a run's trackers, from its directory."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trackers = followed(recipe)
        self._run_dir = run_dir
        self._console = console
        self._clock = clock
        self._look_at = clock() + EVERY_S
        self._down: set[str] = set()

    def look(self) -> None:
        """Called often; looks every few seconds."""
        if not self._trackers or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + EVERY_S
        for tracker in self._trackers:
            error = read_position(self._run_dir, tracker).error
            if error and tracker not in self._down:
                self._down.add(tracker)
                say(
                    self._console,
                    f"{tracker} does not take metrics ({error}): they are kept and sent later",
                    "bold yellow",
                )
            elif not error and tracker in self._down:
                self._down.remove(tracker)
                say(self._console, f"{tracker} takes metrics again", "green")

    def at_end(self) -> None:
        """What is left to send, with the command."""
        for tracker in self._trackers:
            if not all_sent(self._run_dir, tracker):
                say(
                    self._console,
                    f"{tracker} has not taken all metrics: millrace track {self._run_dir} sends the rest",
                    "bold yellow",
                )

"""Errors and interruptions of commands: what is told, and the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from services.common.errors import RollmillError, UserError
from services.common.telemetry.logs import escaped


class Interrupted(Exception):
    """The command was stopped by Ctrl-C or SIGTERM."""


def exit_code(error: RollmillError) -> int:
    """2 for an error that the caller can correct, 1 for any other."""
    return 2 if isinstance(error, UserError) else 1


def tell(error: RollmillError, console: Console) -> None:
    console.print(Text.assemble(("error: ", "bold red"), escaped(error.message)), soft_wrap=True)


class StopSignal:
    """Ctrl-C and SIGTERM. Raises at once, and remembers: an exception inside a C callback is swallowed there.

    While processes are stopped it only remembers: see ``again``.
    """

    def __init__(self) -> None:
        self._received = self._stopping = False
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def check(self) -> None:
        """Called once per turn of every loop."""
        if self._received:
            raise KeyboardInterrupt

    def again(self) -> Callable[[], bool]:
        """From now on a signal raises nothing; returns whether one came since."""
        self._received, self._stopping = False, True
        return lambda: self._received

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, *_: object) -> None:
        self._received = True
        if not self._stopping:
            raise KeyboardInterrupt

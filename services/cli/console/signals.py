"""Ctrl-C and SIGTERM, as the commands that start processes want them."""

from __future__ import annotations

import signal


class StopSignal:
    """Ctrl-C and SIGTERM. Raises at once, and remembers: an exception inside a C callback is swallowed there."""

    def __init__(self) -> None:
        self._received = False
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def check(self) -> None:
        """Called once per turn of every loop."""
        if self._received:
            raise KeyboardInterrupt

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, *_: object) -> None:
        self._received = True
        raise KeyboardInterrupt

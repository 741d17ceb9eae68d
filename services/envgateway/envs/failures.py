"""What an environment's failure says of the action that met it.

An exception of ``DATA_ERRORS`` comes from the bytes that were given; others (memory, files, peers) from the machine. In a
world of ours the first is the action's end of the episode, in a user's class it is the class that failed. Engines' processes
import this: it imports nothing of the gateway.
"""

from __future__ import annotations

import traceback

DATA_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
_SHOWN_CHARS = 500
_SHOWN_FRAMES = 5


def told(error: BaseException) -> str:
    """Kind and message, short: errors repeat what they were given, and that may be megabytes."""
    return f"{type(error).__name__}: {error!s:.{_SHOWN_CHARS}}"


def trace_of(error: BaseException) -> str:
    """Where it was raised, without its message and values: laying those out for a log may take minutes."""
    return "".join(traceback.format_tb(error.__traceback__)[-_SHOWN_FRAMES:])

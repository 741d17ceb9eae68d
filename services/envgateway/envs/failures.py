"""Classifies an environment's failure: caused by the action's bytes, or by the machine.

An exception of ``DATA_ERRORS`` comes from the bytes that were given; others (memory, files, peers) from the machine. In
a world of ours the first is the action's end of the episode, in a user's class it is the class that failed. Engines'
processes import this module, so the module imports no other part of the gateway.
"""

from __future__ import annotations

import traceback

from services.common.user_code import told

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


def short_text(error: BaseException) -> str:
    """Kind and message, shortened: an error may repeat its input, which may have megabytes."""
    return told(error)[:_SHOWN_CHARS]


def trace_of(error: BaseException) -> str:
    """The place of the exception, without its message and values: formatting those for a log may take minutes."""
    return "".join(traceback.format_tb(error.__traceback__)[-_SHOWN_FRAMES:])

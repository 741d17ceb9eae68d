"""Jobs for the supervisor: a source, a mode, a profile and complete limits.

A program's imports choose its profile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from services.common.telemetry.gateway_queue import Lane
from services.envgateway.sandbox.bare.supervisor.places import PROGRAM

MAX_CODE_BYTES = 1 << 20
# A look at the text, not a parse: a false find costs some memory, a missed one the time of an import.
_SCIENTIFIC = re.compile(rb"^[ \t]*(?:import|from)[ \t][^\n#]*\b(?:numpy|sympy|mpmath)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Modes are those of ``bare.messages.MODES``."""

    mode: str
    profile: str
    source: bytes
    limits: dict[str, float | int] = field(default_factory=dict)
    stdin: bytes = b""
    inputs: tuple[int, ...] = ()  # of a host: the sizes of the parts of ``stdin``, each that of one case
    payload: bytes = b""  # input of a harness; the first messages of an interactive run
    interactive: bool = False
    lane: Lane = Lane.INTERACTIVE
    place: str = PROGRAM  # LIVE: apart from the slots of programs

    @property
    def head(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "profile": self.profile,
            "limits": self.limits,
            "interactive": self.interactive,
            "batch": self.lane is Lane.BATCH,
            "place": self.place,
            "inputs": self.inputs,
        }


def profile_of(source: bytes) -> str:
    """The warm interpreter that suits a Python program.

    >>> profile_of(b"import math"), profile_of(b"from sympy import symbols")
    ('plain', 'scientific')
    """
    return "scientific" if _SCIENTIFIC.search(source) else "plain"


def why_unusable(code: str) -> str:
    """Why a text cannot be a program's source; empty for a valid text."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return f"the program is no text: {error}"
    return f"the program has {size} bytes, more than {MAX_CODE_BYTES}" if size > MAX_CODE_BYTES else ""

"""What the supervisor is asked to run: a source, a mode, a profile and complete limits.

Says which profile a program wants from its imports; knows nothing of slots or of what comes out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from services.envgateway.sandbox.bare.places import PROGRAM

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
    payload: bytes = b""  # what a harness reads; the first words of an interactive run
    interactive: bool = False
    patient: bool = False  # leaves a slot to those that are not; may be sent before one is free
    place: str = PROGRAM  # COMPANION: beside a program that it calls; LIVE: apart from the slots of programs

    @property
    def head(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "profile": self.profile,
            "limits": self.limits,
            "interactive": self.interactive,
            "patient": self.patient,
            "place": self.place,
        }


def profile_of(source: bytes) -> str:
    """The warm interpreter that suits a Python program.

    >>> profile_of(b"import math"), profile_of(b"from sympy import symbols")
    ('plain', 'scientific')
    """
    return "scientific" if _SCIENTIFIC.search(source) else "plain"


def why_unusable(code: str) -> str:
    """Why a text cannot be a program's source at all; empty when it can."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return f"the program is no text: {error}"
    return f"the program has {size} bytes, more than {MAX_CODE_BYTES}" if size > MAX_CODE_BYTES else ""

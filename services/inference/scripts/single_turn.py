"""``single_turn``: the reference answer, or a wrong one."""

from __future__ import annotations

from services.inference.scripts.answers import answer
from services.inference.scripts.base import Cue


def speak(cue: Cue) -> str:
    return answer(cue, right=cue.is_right())

"""Random filler words: the reasoning of a scripted policy before its answer."""

from __future__ import annotations

from services.inference.scripts.base import Cue

_TEXT = (
    "first we look at what is given and write it down then each step follows from the one before so the rest is known "
    "now compare both sides again and count what is left over to see that nothing was lost on the way"
)
_WORDS = _TEXT.split()


def reasoning(cue: Cue, topic: str = "") -> str:
    """``cue.num_words`` drawn words and a space; empty if the recipe grades with a function of its own, which may need the bare
    answer."""
    if not cue.num_words or ":" in str(getattr(cue.settings, "reward", "")):
        return ""
    draw = cue.random(f"words/{topic}/{len(cue.said)}")
    return " ".join(draw.choice(_WORDS) for _ in range(cue.num_words)) + ". "

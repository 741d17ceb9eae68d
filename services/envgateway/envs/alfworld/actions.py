"""What a policy's reply means: the command behind ``ACTION:``, or the listed one that it resembles most."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.envgateway.envs.alfworld.bleu import bleu

_ACTION = re.compile(r"ACTION:(.*)")
_LEAST_ALIKE = 0.01


def read_action(reply: str) -> str | None:
    """What follows the first ``ACTION:`` on its line, lower-cased; None when there is nothing."""
    found = _ACTION.search(reply)
    return (found[1].strip().lower() or None) if found else None


def choose(action: str, admissible: Sequence[str]) -> str:
    """The action itself if it is listed, else the listed one most like it, else itself: the engine will say no.

    The first of equals wins.
    """
    if not admissible or action in admissible:
        return action
    likeness = [round(bleu(listed, action), 12) for listed in admissible]
    best = max(likeness)
    return admissible[likeness.index(best)] if best > _LEAST_ALIKE else action

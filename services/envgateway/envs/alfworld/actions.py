"""Which of the listed actions a policy means by one that is not listed."""

from __future__ import annotations

from collections.abc import Sequence

from services.envgateway.envs.alfworld.bleu import bleu

_LEAST_ALIKE = 0.01


def choose(action: str, admissible: Sequence[str]) -> str:
    """The action itself if it is listed, else the listed one most like it, else itself: the engine will say no.

    The first of equals wins.
    """
    if not admissible or action in admissible:
        return action
    likeness = [round(bleu(listed, action), 12) for listed in admissible]
    best = max(likeness)
    return admissible[likeness.index(best)] if best > _LEAST_ALIKE else action

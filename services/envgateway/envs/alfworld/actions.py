"""Maps an action that is not listed to the most similar listed action."""

from __future__ import annotations

from collections.abc import Sequence

from services.envgateway.envs.alfworld.bleu import bleu

_LEAST_ALIKE = 0.01


def choose(action: str, admissible: Sequence[str]) -> str:
    """The action if listed, else the most similar listed action, else the action unchanged: the engine will refuse.

    The first of equals wins.
    """
    if not admissible or action in admissible:
        return action
    likeness = [round(bleu(listed, action), 12) for listed in admissible]
    best = max(likeness)
    return admissible[likeness.index(best)] if best > _LEAST_ALIKE else action

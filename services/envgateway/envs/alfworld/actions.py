"""Maps an action that is not listed to the most similar listed action.

BLEU of one short sentence against another: how alike two commands are, from 0 to 1.

Spaces separate words. n-grams up to four count alike; missing ones are smoothed by the sentence's length (Chen
and Cherry's fourth method), as short commands rarely share four words in a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

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


_LONGEST = 4
_SMOOTHING = 5.0


def bleu(reference: str, candidate: str) -> float:
    """0 when they share no word. Not symmetric: a candidate that is too short is punished, one too long only diluted."""
    reference_words, words = reference.split(), candidate.split()
    shared = [_shared(reference_words, words, n) for n in range(1, _LONGEST + 1)]
    if shared[0] == 0:
        return 0.0
    logs = 0.0
    missing = 0
    for n, count in enumerate(shared, start=1):
        possible = max(1, len(words) - n + 1)
        if count > 0:
            logs += math.log(count / possible)
        elif len(words) > 1:  # a single word has no longer n-grams to be judged by
            missing += 1
            logs += math.log(math.log(len(words)) / (2**missing * _SMOOTHING) / possible)
    brevity = 1.0 if len(words) > len(reference_words) else math.exp(1 - len(reference_words) / len(words))
    return brevity * math.exp(logs / _LONGEST)


def _shared(reference: Sequence[str], candidate: Sequence[str], n: int) -> int:
    """Number of the candidate's n-grams that the reference has, each counted at most as often as there."""
    return (_grams(candidate, n) & _grams(reference, n)).total()


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

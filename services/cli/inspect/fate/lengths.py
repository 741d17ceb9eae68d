"""Shares of fates by quantile of the length, and the bias of the mean length."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from services.cli.inspect.fate.facts import Fate

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
NAMES = ("p0-50", "p50-90", "p90-99", ">p99")
_FATES = tuple(Fate)
_CODES = {fate: code for code, fate in enumerate(_FATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Sequences of one quarter of the lengths, from a quantile to the next."""

    name: str
    shortest: int  # tokens
    longest: int
    num_sequences: int
    num_tokens: int
    fates: Counter[Fate]  # sequences
    num_trained_tokens: int

    @property
    def trained_share(self) -> float:
        """Of the sequences."""
        return self.fates[Fate.TRAINED] / self.num_sequences


@dataclass(slots=True)
class Lengths:
    """The sequences of one policy with a decided fate: 13 bytes each."""

    steps: array[int] = field(default_factory=lambda: array("I"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    trained: array[int] = field(default_factory=lambda: array("I"))  # tokens, without the masked ones
    fates: array[int] = field(default_factory=lambda: array("B"))

    def add(self, step: int, fate: Fate, length: int, trained: int) -> None:
        self.steps.append(step)
        self.lengths.append(length)
        self.trained.append(trained)
        self.fates.append(_CODES[fate])

    def bands(self, step: int | None = None) -> list[Band]:
        """Of task groups issued in one step, or in all; shortest first. Bands that ties leave empty are not there."""
        chosen, lengths, trained, fates = self._arrays(step)
        if not chosen:
            return []
        limits = np.quantile(lengths, QUANTILES[1:])
        place = np.searchsorted(limits, lengths, side="left")  # a length at a limit is below it
        found = []
        for number, name in enumerate(NAMES):
            here = place == number
            if here.any():
                found.append(
                    Band(
                        name=name,
                        shortest=int(lengths[here].min()),
                        longest=int(lengths[here].max()),
                        num_sequences=int(here.sum()),
                        num_tokens=int(lengths[here].sum()),
                        fates=Counter({_FATES[c]: int(n) for c, n in enumerate(np.bincount(fates[here])) if n}),
                        num_trained_tokens=int(trained[here].sum()),
                    )
                )
        return found

    def means(self, step: int | None = None) -> tuple[float, float] | None:
        """(of the sequences that were trained, of all that were played), in tokens; None where none was trained."""
        _, lengths, _, fates = self._arrays(step)
        was_trained = fates == _CODES[Fate.TRAINED]
        return (float(lengths[was_trained].mean()), float(lengths.mean())) if was_trained.any() else None

    def _arrays(self, step: int | None) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        steps = np.frombuffer(self.steps, dtype=np.uint32) if self.steps else np.zeros(0, dtype=np.uint32)
        chosen = np.ones(len(steps), dtype=bool) if step is None else steps == step
        columns = [np.array(column, dtype=np.int64)[chosen] for column in (self.lengths, self.trained, self.fates)]
        return int(chosen.sum()), columns[0], columns[1], columns[2]

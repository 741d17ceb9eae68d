"""Cases of published RL code, and how far our answers are from theirs: used by oracle_vectors.py and by the tests.

A file of ROLLMILL_DATA_ROOT/oracle_vectors is one algorithm. An adapter runs one of its cases through the real
functions of the trainer and gives an ``Answer``. ``judge`` compares both answers:

    agrees      every output is within the case's tolerance of the oracle's
    by design   different, and the adapter gives the reason; agreement in spite of a reason is a fault of the adapter
    differs     neither: a defect
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Number = float | int | None
Values = Number | Sequence[Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of an oracle. ``inputs`` and ``outputs`` are flat lists over tokens or sequences, or single numbers."""

    algorithm: str
    name: str
    oracle: str
    function: str
    tolerance: float
    settings: Mapping[str, Any]  # the oracle's, in its own words
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.algorithm}: {self.oracle}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Our numbers under the oracle's names. None in place of one element leaves that element out of the comparison."""

    outputs: Mapping[str, Values]
    by_design: str | None = None  # why another answer is ours, where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    case: Case
    difference: float  # largest |ours - theirs| / max(1, |theirs|)
    output: str  # of which output
    by_design: str | None = None

    @property
    def agrees(self) -> bool:
        return self.difference <= self.case.tolerance


Adapter = Callable[[Case], Answer]


def folder() -> Path | None:
    """Where the vectors are; None where ROLLMILL_DATA_ROOT has none."""
    found = Path(os.environ.get("ROLLMILL_DATA_ROOT") or "/none") / "oracle_vectors"
    return found if found.is_dir() else None


def algorithms(root: Path) -> list[str]:
    return sorted(file.stem for file in root.glob("*.json"))


def cases(root: Path, algorithm: str) -> list[Case]:
    tree = json.loads((root / f"{algorithm}.json").read_text())
    if tree["format"] != 1:
        raise ValueError(f"{algorithm}.json has format {tree['format']}; this script reads 1")
    return [
        Case(
            algorithm=algorithm,
            name=case["name"],
            oracle=case["oracle"],
            function=case["function"],
            tolerance=case["tolerance"],
            settings=case["hyperparameters"],
            inputs=case["inputs"],
            outputs=case["outputs"],
        )
        for case in tree["cases"]
    ]


def judge(case: Case, answer: Answer) -> Verdict:
    """The largest difference over the outputs that the answer names.

    Raises:
        ValueError: the answer has no name, a name that the oracle lacks, or another number of values.
    """
    if not answer.outputs:
        raise ValueError(f"{case.title}: no values to compare")
    worst, where = 0.0, ""
    for name, ours in answer.outputs.items():
        difference = _difference(case, name, ours)
        if difference > worst or not where:
            worst, where = difference, name
    return Verdict(case=case, difference=worst, output=where, by_design=answer.by_design)


def _difference(case: Case, name: str, ours: Values) -> float:
    theirs = case.outputs
    for part in name.split("."):  # counts.clipped_tokens
        theirs = theirs[part]
    mine = list(ours) if isinstance(ours, Sequence) else [ours]
    expected = list(theirs) if isinstance(theirs, Sequence) else [theirs]
    if len(mine) != len(expected):
        raise ValueError(f"{case.title}: {name} has {len(mine)} values, the oracle {len(expected)}")
    pairs = [(m, e) for m, e in zip(mine, expected, strict=True) if m is not None and e is not None]
    differences = [abs(m - e) / max(1.0, abs(e)) for m, e in pairs]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf

"""Losses and advantages answer as published RL code does, on data/oracle_vectors, or differ for a stated reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._oracle_vectors import algorithms, cases, folder, judge  # type: ignore[import-not-found]
from benchmarks.oracle_vectors import ADAPTERS, summary  # type: ignore[import-not-found]

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3] / "benchmarks")
)  # its modules import each other by bare names


@pytest.mark.needs("oracle vectors")
@pytest.mark.parametrize("algorithm", sorted(ADAPTERS))
def test_every_case_agrees_or_differs_by_design(algorithm: str, record_property: Callable[[str, object], None]) -> None:
    root = folder()
    assert root is not None
    verdicts = [judge(case, ADAPTERS[algorithm](case)) for case in cases(root, algorithm)]
    facts = summary(verdicts)
    record_property("oracle_vectors", facts)
    without_reason = [v for v in verdicts if not v.agrees and v.by_design is None]
    assert verdicts and [(v.case.title, v.output, v.difference) for v in without_reason] == []
    assert [v.case.title for v in verdicts if v.agrees and v.by_design] == [], "they are said to differ"


@pytest.mark.needs("oracle vectors")
def test_every_file_has_an_adapter() -> None:
    root = folder()
    assert root is not None and set(algorithms(root)) == set(ADAPTERS)

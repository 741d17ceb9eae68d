"""Losses and advantages answer as published RL code does, on data/oracle_vectors, or differ for a stated reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._oracle_vectors import Answer, Case, algorithms, cases, folder, judge  # type: ignore[import-not-found]
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


def made_up(**outputs: object) -> Case:
    return Case(
        algorithm="a", name="n", oracle="o", function="f", tolerance=1e-7, settings={}, inputs={}, outputs=outputs
    )


def test_a_verdict_is_of_the_largest_difference_relative_to_large_answers() -> None:
    case = made_up(loss=100.0, gradient=[1.0, 2.0, 0.001], counts={"clipped": 3})
    verdict = judge(case, Answer(outputs={"loss": 100.5, "gradient": [1.0, None, 0.002], "counts.clipped": 3}))
    assert (verdict.output, verdict.agrees) == ("loss", False)
    assert verdict.difference == pytest.approx(0.005)
    assert judge(case, Answer(outputs={"gradient": [1.0, 2.0 + 1e-8, 0.001]})).agrees


def test_nan_never_agrees_and_an_empty_comparison_is_refused() -> None:
    case = made_up(gradient=[1.0, 2.0])
    assert not judge(case, Answer(outputs={"gradient": [float("nan"), 2.0]})).agrees
    with pytest.raises(ValueError, match="gradient has 1 values, the oracle 2"):
        judge(case, Answer(outputs={"gradient": [1.0]}))
    with pytest.raises(ValueError, match="no values to compare"):
        judge(case, Answer(outputs={}))

"""Labels that one process writes and another reads are members of their enums, never string literals elsewhere.

Labels of several words, and labels with a separator, may appear in the file of their enum only. Words such as "training"
have other uses, so for these the test checks the places that make or compare an activity, a hold or a phase.
"""

import ast
import enum
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.kept_tokens import MaskedCause
from services.common.records import TRANSFER_STAGES, PhaseKind, RunCount, StepFact, WeightTransfer
from services.common.telemetry import accounts
from services.common.telemetry.accounts import ActivityName, TrainerState
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import (
    DatasetSummary,
    EstimateSummary,
    EvaluationSummary,
    QueueGauge,
    RolloutKey,
    ThroughputKey,
    TrainerKey,
)
from services.orchestrator.journal.entries import DatasetScore, Estimate, EvaluationResult
from services.orchestrator.stalls import Hold
from services.trainer.metrics import StepMetrics

ROOT = Path(__file__).resolve().parents[2]
DEFINED_IN: dict[type[enum.StrEnum], str] = {
    ActivityName: "services/common/telemetry/accounts.py",
    QueueGauge: "services/common/telemetry/metrics.py",
    LogEvent: "services/common/telemetry/logs.py",
    PhaseKind: "services/common/records.py",
    RolloutKey: "services/common/telemetry/metrics.py",
    RunCount: "services/common/records.py",
    StepFact: "services/common/records.py",
}
COMPONENTS = {value for value in vars(accounts).values() if isinstance(value, str) and "/" in value.strip("/")}
# Calls and keyword arguments that take a label: a literal there is a label that is typed twice.
TAKES_LABEL = {"Activity", "ActivityTime", "during", "hold", "phase", "RolloutPhase", "TimeAccount"}
LABEL_KEYWORDS = {"name", "what", "activity", "base"}
COMPARED = {"name", "on", "what"}
LABELS = {label.value for label in (*ActivityName, *TrainerState, *PhaseKind, *Hold, *MaskedCause)} - {Hold.GATEWAY}
# Equal words with another meaning, by file.
OTHER_MEANINGS = {
    "services/cli/inspect/fate.py": {"not_recorded"},  # a fate
    "services/cli/inspect/trace.py": {"waiting for a batch"},  # a stage of a task group's life
    "services/common/records.py": {"the run has ended"},  # a reason for which a task group is closed
    "services/envgateway/rpc.py": {"the run has ended"},  # a reason for which the gateway leaves
}


@functools.cache
def parsed() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted((ROOT / "services").rglob("*.py"))
        if "pb" not in path.relative_to(ROOT).parts
    }


def literals(tree: ast.Module) -> Iterator[ast.Constant]:
    """String constants without docstrings."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def typed_twice(tree: ast.Module, path: str) -> Iterator[str]:
    """Labels in the tree of a file outside their enum, as "path:line: label"."""
    owned = {label.value: file for of, file in DEFINED_IN.items() for label in of if re.search(r"[^a-z]", label.value)}
    owned |= dict.fromkeys(COMPONENTS, "services/common/telemetry/accounts.py")
    for node in literals(tree):
        if owned.get(str(node.value), path) != path and node.value not in OTHER_MEANINGS.get(path, ()):
            yield f"{path}:{node.lineno}: {node.value}"


def untyped(tree: ast.Module, path: str) -> Iterator[str]:
    """Literals where an activity, a hold or a phase is made or compared."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in TAKES_LABEL:
                found = [*node.args[:1], *(k.value for k in node.keywords if k.arg in LABEL_KEYWORDS)]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr in COMPARED:
            found = node.comparators
        for literal in found:
            if isinstance(literal, ast.Constant) and literal.value in LABELS:
                yield f"{path}:{literal.lineno}: {literal.value}"


def test_no_label_of_the_detector_is_typed_outside_its_enum() -> None:
    assert [told for path, tree in parsed().items() for told in typed_twice(tree, path)] == []


def test_no_activity_hold_or_phase_is_made_or_compared_by_a_literal() -> None:
    assert [told for path, tree in parsed().items() for told in untyped(tree, path)] == []


@pytest.mark.parametrize(
    "source",
    [
        'account.set("waiting for task groups")',
        'gauges["queue_workers"] = 1.0',
        'log.info("record.dropped")',
        'COLORS = {"create_episode": "red"}',
        'on = "envgateway/workers"',
        'counters["slots_cancelled"] += 1',
    ],
)
def test_a_label_that_is_typed_twice_is_found(source: str) -> None:
    assert list(typed_twice(ast.parse(source), "services/x.py"))


@pytest.mark.parametrize(
    "source",
    [
        'Activity("training", NOBODY)',
        'ActivityTime(name="idle", seconds=1.0)',
        'dispatcher.hold("disk", "full")',
        'clock.phase("judge")',
        'busy = activity.name == "generating"',
        'again = phase.what == "retry"',
    ],
)
def test_a_literal_where_a_label_is_taken_is_found(source: str) -> None:
    assert list(untyped(ast.parse(source), "services/x.py"))


def test_words_in_other_places_and_docstrings_are_no_labels() -> None:
    source = '"""waiting for task groups"""\nmode = "training"\nprint("idle")\n'
    assert not [*typed_twice(ast.parse(source), "services/x.py"), *untyped(ast.parse(source), "services/x.py")]


def test_keys_of_the_trainer_are_fields_of_its_metrics() -> None:
    assert {key.value for key in TrainerKey} <= set(StepMetrics.__dataclass_fields__)


def test_stages_of_a_transfer_are_fields_of_its_record() -> None:
    assert set(TRANSFER_STAGES) <= set(WeightTransfer.__dataclass_fields__)


def test_summaries_have_the_fields_of_their_records() -> None:
    assert set(EvaluationSummary.__annotations__) == set(EvaluationResult.__dataclass_fields__) - {"name"}
    assert set(DatasetSummary.__annotations__) == set(DatasetScore.__dataclass_fields__)
    assert set(EstimateSummary.__annotations__) == set(Estimate.__dataclass_fields__)


def test_enums_of_labels_have_distinct_values() -> None:
    for of in (*DEFINED_IN, Hold, ThroughputKey, TrainerKey):
        assert len({label.value for label in of}) == len(of.__members__), of

"""The audit of a journal finds every kind of violation in a forged journal, and none in a correct one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._journal_audit import Findings, Rule, audit
from services.common import records as fates
from services.common.records import MinibatchTotals, WeightVersion
from services.orchestrator.journal import entries as records
from services.orchestrator.journal import entries as rollouts
from services.orchestrator.journal.entries import BatchEntry, BatchRecord, GroupRecord, GroupVerdict
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from tests.unit.orchestrator.builders import failure, order, trajectory

SIZE, STEPS = 2, 3
Line = tuple[str, str, dict[str, Any]]  # kind, key, record


def group(name: str) -> Line:
    record = GroupRecord(order=order(name, SIZE), position=0, evaluation="", replica_id="a", incarnation="1")
    return records.GROUP, name, records.to_json(record)


def slot(name: str, index: int) -> Line:
    return records.TRAJECTORY, f"{name}/{index}", rollouts.to_json(trajectory(name, index))


def failed(name: str, index: int) -> Line:
    return records.FAILURE, f"{name}/{index}", rollouts.to_json(failure(name, index))


def verdict(name: str, outcome: fates.GroupFate = fates.GroupFate.KEPT) -> Line:
    found = GroupVerdict(
        policy="model0", role="agent", attempt=0, num_sequences=SIZE, num_kept=SIZE, mean=0.0, std=1.0, outcome=outcome
    )
    return records.VERDICT, name, records.to_json(records.Verdicts(task_group_id=name, advantage_groups=(found,)))


def closed(name: str, reason: fates.ClosedReason = fates.ClosedReason.TRAINED) -> Line:
    return records.CLOSED, name, {"task_group_id": name, "reason": reason.value}


def batch(step: int, *names: str, replayed: bool = False, indices: int = SIZE) -> Line:
    entries = tuple(
        BatchEntry(
            sequence_id=f"{name}/{index}/0", minibatch=0, position=0, group_mean=0.0, group_std=1.0, group_size=SIZE,
            staleness=0, num_tokens=6, replayed=replayed,
        )
        for name in names
        for index in range(indices)
    )  # fmt: skip
    totals = (MinibatchTotals(num_sequences=len(entries), num_trained_tokens=4 * len(entries)),)
    record = BatchRecord(policy="model0", training_step=step, entries=entries, minibatches=totals)
    return records.BATCH, records.batch_key("model0", step), records.to_json(record)


def version(number: int, digest: str = "") -> Line:
    made = WeightVersion(policy="model0", number=number, digest=digest or f"d{number}")
    return records.VERSION, f"model0/{number}", records.to_json(records.VersionRecord(version=made))


def state(**counters: float) -> Line:
    record = {"phase": "training", "paused": False, "counters": records.pairs(counters), "timeline": []}
    return records.STATE, "", record


def good() -> list[Line]:
    """Three steps of one group each, one group that is being played, and a state."""
    lines = [version(0)]
    for step in range(1, STEPS + 1):
        name = f"m-{step}"
        lines += [
            group(name),
            slot(name, 0),
            slot(name, 1),
            verdict(name),
            batch(step, name),
            closed(name),
            version(step),
        ]
    return [*lines, group("m-9"), slot("m-9", 0), state(task_groups_issued=4, tokens_recorded=28)]


@pytest.fixture
def audited(tmp_path: Path) -> Callable[..., Findings]:
    def write(lines: list[Line]) -> None:
        async def run() -> None:
            journal = Journal(tmp_path)
            journal.start()
            for kind, key, record in lines:
                await journal.append(kind, key, record)
            await journal.close()

        asyncio.run(run())

    def check(lines: list[Line], *acknowledged: str, finished: bool = False) -> Findings:
        write(lines)
        reader = JournalReader(tmp_path)
        try:
            return audit(reader, acknowledged, finished=finished)
        finally:
            reader.close()

    return check


def without(lines: list[Line], kind: str, key: str) -> list[Line]:
    return [line for line in lines if line[:2] != (kind, key)]


def found(findings: Findings) -> dict[Rule, list[str]]:
    return {rule: texts for rule, texts in findings.violations.items() if texts}


def test_a_good_journal_has_no_violation(audited: Callable[..., Findings]) -> None:
    findings = audited(good(), "m-1/0", "m-3/1", "m-9/0")
    assert findings.clean, found(findings)
    assert (findings.num_slots, findings.num_batches, findings.num_versions) == (7, 3, 4)


@pytest.mark.parametrize(
    ("forge", "rule", "said"),
    [
        (
            lambda: without(good(), records.TRAJECTORY, "m-9/0"),
            Rule.LOST,
            "slot m-9/0 was acknowledged and has no record",
        ),
        (lambda: without(good(), records.TRAJECTORY, "m-2/1"), Rule.LOST, "m-2/1/0 of step 2 has no trajectory"),
        (lambda: [*good(), slot("m-9", 0)], Rule.TWICE, "slot m-9/0 has 2 records"),
        (lambda: [*good(), failed("m-9", 0)], Rule.TWICE, "slot m-9/0 has 2 records"),
        (lambda: [*good(), batch(2, "m-9", indices=1)], Rule.TWICE, "step 2 of model0 has 2 batches"),
        (lambda: [*good(), batch(4, "m-1")], Rule.TWICE, "m-1/0/0 is in the batches of steps 1 and 4"),
        (lambda: [*good(), version(2, "other")], Rule.TWICE, "version model0/2 has the digests d2 and other"),
        (lambda: [*good(), version(5)], Rule.ORDER, "version 5 of model0 follows version 3"),
        (lambda: without(good(), records.VERSION, "model0/2"), Rule.ORDER, "version 3 of model0 follows version 1"),
        (lambda: [*good(), batch(5, "m-9", indices=1)], Rule.ORDER, "step 4 of model0 has no batch"),
        (lambda: without(good(), records.BATCH, "model0/2"), Rule.ORDER, "step 2 of model0 has no batch"),
        (lambda: [version(0), group("m-1"), version(1), batch(1)], Rule.ORDER, "before the batch of its step"),
        (
            lambda: [*good(), batch(4, "m-9", replayed=True, indices=1)],
            Rule.ORDER,
            "is replayed in step 4, never trained",
        ),
        (
            lambda: [*good(), slot("m-77", 0)],
            Rule.ORDER,
            "slot m-77/0 has a record, and its task group was never issued",
        ),
        (lambda: without(good(), records.CLOSED, "m-2"), Rule.OPEN, "task group m-2 is in a batch and not closed"),
        (lambda: [*good(), closed("m-9")], Rule.OPEN, "task group m-9 is closed as trained and in no batch"),
        (lambda: [*good(), failed("m-9", 1)], Rule.OPEN, "task group m-9 is complete, and neither closed nor kept"),
        (lambda: [*good(), state(task_groups_issued=5, tokens_recorded=28)], Rule.COUNTERS, "task_groups_issued is 5"),
        (lambda: [*good(), state(task_groups_issued=4, tokens_recorded=27)], Rule.COUNTERS, "tokens_recorded is 27"),
        (lambda: [*good(), state(task_groups_issued=4)], Rule.COUNTERS, "tokens_recorded is 0"),
    ],
)
def test_each_kind_of_violation_is_found(
    audited: Callable[..., Findings], forge: Callable[[], list[Line]], rule: Rule, said: str
) -> None:
    findings = audited(forge(), "m-1/0", "m-9/0")
    assert not findings.clean
    assert any(said in text for text in findings.violations[rule]), found(findings)


def test_a_group_with_open_slots_is_a_violation_only_once_the_run_has_finished(
    audited: Callable[..., Findings],
) -> None:
    assert any("m-9" in text for text in audited(good(), finished=True).violations[Rule.OPEN])

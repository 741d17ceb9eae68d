"""The diagnosis of a run: a pure function of the rows of its metrics and its recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.cli.doctor.findings import Verdict
from services.cli.doctor.learning import learning
from services.cli.doctor.rules import RULES, PolicyRows
from services.common.config.recipe import Recipe
from services.common.telemetry.metrics import RowKind, StallMoment

Row = Mapping[str, Any]


def diagnose(rows: Iterable[Row], recipe: Recipe) -> Verdict:
    """Which failures the rows show. ``rows`` are those of ``metrics/orchestrator.jsonl``, in their order."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(str(row.get("kind")), []).append(row)
    stalls = _open_stalls(by_kind.get(RowKind.STALL, []))
    evaluations = by_kind.get(RowKind.EVALUATION, [])
    found, findings = [], []
    for policy in recipe.trained_policies:
        steps = list(_last_of_each(by_kind.get(RowKind.TRAINING_STEP, []), policy))
        learned = learning(policy, steps, evaluations)
        of_policy = PolicyRows(
            policy=policy,
            recipe=recipe,
            learning=learned,
            steps=steps,
            transfers=[row for row in by_kind.get(RowKind.WEIGHT_TRANSFER, []) if row["policy"] == policy],
            open_stalls=stalls,
        )
        found.append(learned)
        findings += [finding for rule in RULES if (finding := rule(of_policy)) is not None]
    return Verdict(learning=tuple(found), findings=tuple(findings))


def _last_of_each(rows: list[Row], policy: str) -> Iterable[Row]:
    """Rows of a policy's steps in order; the last row counts where a recovery has repeated a step."""
    by_step = {row["step"]: row for row in rows if row["policy"] == policy}
    return (by_step[step] for step in sorted(by_step))


def _open_stalls(rows: list[Row]) -> dict[str, Row]:
    """The newest begin of each cause without an end."""
    open_now: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["component"], row["cause"]
        if row["moment"] == StallMoment.BEGIN:
            open_now[key] = row
        else:
            open_now.pop(key, None)
    return {cause: row for (_, cause), row in open_now.items()}

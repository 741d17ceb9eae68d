"""The diagnosis of a run, and whether a policy has learned: pure functions of the rows of its metrics and its recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console import say
from services.cli.doctor.findings import LEAST_POINTS, Change, Learning, Verdict, change
from services.cli.doctor.rules import RULES, PolicyRows
from services.cli.inspect.run_state import Row, read_metrics, training_steps
from services.common.config.reading.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.telemetry.metrics import RowKind, StallMoment, StepKey
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.dispatch.evaluation_pass import kind_of

TRAINING = "training rollouts"


def diagnose(rows: Iterable[Row], recipe: Recipe) -> Verdict:
    """Which failures the rows show. ``rows`` are those of ``metrics/orchestrator.jsonl``, in their order."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(str(row.get("kind")), []).append(row)
    stalls = _open_stalls(by_kind.get(RowKind.STALL, []))
    reports = [ReportedTransfer.from_row(row) for row in by_kind.get(RowKind.WEIGHT_TRANSFER, [])]
    evaluations = by_kind.get(RowKind.EVALUATION, [])
    trained = training_steps(by_kind.get(RowKind.TRAINING_STEP, []))
    found, findings = [], []
    for policy in recipe.trained_policies:
        steps = trained.get(policy, [])
        learned = learning(policy, steps, evaluations)
        of_policy = PolicyRows(
            policy=policy,
            recipe=recipe,
            learning=learned,
            steps=steps,
            transfers=[report for report in reports if report.transfer.policy == policy],
            open_stalls=stalls,
        )
        found.append(learned)
        findings += [finding for rule in RULES if (finding := rule(of_policy)) is not None]
    return Verdict(learning=tuple(found), findings=tuple(findings))


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


def learning(policy: str, steps: Sequence[Row], evaluations: Sequence[Row]) -> Learning:
    """The largest gain that any measure shows: a policy that has learned shows a gain in one measure at least.

    A greedy evaluation may be perfect before training, and the tasks of training rollouts change with a curriculum, so no
    single measure decides. But where every evaluation falls, training rollouts prove no gain: their reward may
    measure another ability. With few steps only an evaluation with a certain gain decides.
    """
    evaluated = max(_of_evaluations(policy, evaluations), key=_order, default=None)
    if evaluated is not None and len(steps) < LEAST_POINTS and evaluated[1].low <= 0:
        evaluated = None
    rewards = [row[StepKey.ROLLOUT_REWARD_MEAN] for row in steps if row.get(StepKey.ROLLOUT_REWARD_MEAN) is not None]
    trained = change(rewards)
    measures = [evaluated] if evaluated is not None else []
    if trained is not None and (evaluated is None or evaluated[1].high >= 0):
        measures.append((TRAINING, trained))
    measured, best = max(measures, key=_order, default=("", None))
    return Learning(
        policy=policy,
        num_steps=len(steps),
        measured=measured,
        change=best,
        evaluated=None if evaluated is None else evaluated[1],
        trained=trained,
    )


def _order(measure: tuple[str, Change]) -> tuple[float, float]:
    """Of equal gains the one with more room comes first: a perfect greedy score tells nothing."""
    return measure[1].low, -measure[1].first


def _of_evaluations(policy: str, rows: Sequence[Row]) -> list[tuple[str, Change]]:
    """By way of sampling: the change from the first evaluation to the last that is compared with it, paired by tasks."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == RowKind.EVALUATION and policy in row["versions"] and row.get("difference"):
            kind = kind_of(row["name"])
            if kind not in last or max(row["versions"].values()) >= max(last[kind]["versions"].values()):
                last[kind] = row
    found = []
    for kind, row in last.items():
        gain, after = row["difference"], row["mean_reward"]
        found.append((f"evaluation {kind}", Change(after - gain["value"], after, gain["low"], gain["high"])))
    return found


NOTHING_LEARNED_EXIT = 3
"""Exit code of ``rollmill run`` with ``run.fail_when_nothing_learned``."""


def examine(run_dir: Path) -> Verdict:
    """The verdict on a run, from its directory; raises ``ConfigError`` when it has no metrics."""
    return diagnose(read_metrics(run_dir), load_resolved(run_dir))


def tell(verdict: Verdict, console: Console) -> None:
    """Print whether each policy has learned, and each finding with its evidence and remedy."""
    for learning in verdict.learning:
        say(console, _learning(learning), "green" if learning.learned else "bold yellow", wrap=True)
    for finding in verdict.findings:
        say(console, f"{finding.policy}: {finding.failure}", "bold red")
        say(console, f"  seen: {finding.evidence}", wrap=True)
        say(console, f"  try:  {finding.remedy}", wrap=True)


def as_object(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON."""
    return {
        "nothing_learned": verdict.nothing_learned,
        "learning": [{**asdict(one), "learned": one.learned} for one in verdict.learning],
        "findings": [{**asdict(one), "failure": one.failure.name.lower()} for one in verdict.findings],
    }


def _learning(learning: Learning) -> str:
    if learning.change is None:
        return f"{learning.policy}: no verdict: {learning.num_steps} training steps, and it takes {LEAST_POINTS} to tell a change from noise"
    verb = "learned" if learning.learned else "has not learned"
    return f"{learning.policy} {verb}: reward of {learning.measured} {learning.change}"

"""Whether a policy has learned, from its evaluations and the rewards of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.cli.doctor.findings import Learning
from services.cli.doctor.windows import LEAST_POINTS, Change, change
from services.common.telemetry.metrics import RowKind, StepKey
from services.orchestrator.dispatch.evaluation import kind_of

TRAINING = "training rollouts"

Row = Mapping[str, Any]


def learning(policy: str, steps: Sequence[Row], evaluations: Sequence[Row]) -> Learning:
    """The largest gain that any measure shows: a policy that has learned shows a gain in one measure at least.

    A greedy evaluation may be perfect before training, and the tasks of training rollouts change with a curriculum, so no
    single measure decides. But where every evaluation falls, training rollouts prove no gain: their reward may
    measure another ability.
    """
    enough = len(steps) >= LEAST_POINTS
    evaluated = max(_of_evaluations(policy, evaluations) if enough else (), key=_order, default=None)
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

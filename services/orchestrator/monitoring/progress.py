"""Progress of the run as one record for people and tools, with the waits between components. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.checkpoints import CheckpointGauge
from services.common.records.fates import SetAsideReason
from services.common.records.types import by_name
from services.common.telemetry.accounts import AccountState
from services.common.telemetry.metrics import StepKey
from services.orchestrator.dispatch.threshold import ThresholdState
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.monitoring.views import ProgressView
from services.orchestrator.policy_view import PolicyView
from services.orchestrator.stalls.detector import Stall
from services.orchestrator.state.disk_forecast import DiskOutlook
from services.orchestrator.state.run_control import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProgress:
    policy: str
    version: int
    num_steps: int
    num_buffered: int
    num_expected: int
    reward_mean: float | None  # of rollouts that finished before the newest batch, raw; None where none did
    staleness_max: int
    trainer_state: str
    metrics: Mapping[str, float]
    quota: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProgress:
    replica_id: str
    num_slots: int
    num_running: int
    tokens_per_s: float
    versions: Mapping[str, int]
    lease_left_s: float
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StallProgress:
    """A stall; ``since`` in seconds since the epoch."""

    component: str
    cause: str
    detail: str
    since: float
    advice: str
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    at: float
    state: RunState
    policies: tuple[PolicyProgress, ...]
    replicas: tuple[ReplicaProgress, ...]
    tokens_per_s: float
    evaluations: tuple[EvaluationResult, ...]
    counters: Mapping[str, int]
    waits: tuple[str, ...]
    started_at: float = 0.0
    stalls: tuple[StallProgress, ...] = ()
    accounts: tuple[AccountState, ...] = ()
    disk: DiskOutlook | None = None
    set_aside: Mapping[tuple[str, SetAsideReason], int] = field(default_factory=dict)  # records by kind and reason
    threshold: ThresholdState | None = None  # of ``run.until``


def progress(view: ProgressView) -> Progress:
    return Progress(
        at=time.time(),
        state=view.control.state,
        policies=tuple(_policy(view, policy) for policy in view.policies.values()),
        replicas=tuple(_replicas(view)),
        tokens_per_s=view.pool.tokens_per_s,
        evaluations=tuple(view.evaluations.results.values()),
        counters={**view.counters, **_of_checkpoints(view)},
        waits=tuple(waits(view)),
        started_at=view.started_at,
        stalls=tuple(_stall(view, stall) for stall in view.stall_state.stalls),
        accounts=view.stall_state.book.totals(),
        disk=view.disk.outlook,
        set_aside=view.aside.counts(),
        threshold=None if view.threshold is None else view.threshold.state(),
    )


def waits(view: ProgressView) -> list[str]:
    """The waits between components, for people."""
    found: list[str] = []
    if view.journal.blocked:
        found.append(f"journal waits for free disk: {view.journal.blocked}")
    for policy, ledger in view.ledgers.items():
        trained = view.policies.get(policy)
        if trained is None:
            if ledger.newest is None:
                found.append(f"run waits for a replica that serves {policy}")
            continue
        if (
            trained.trainer is None
            and not view.control.ended
            and ledger.newest_number < view.versions.last_step(policy)
        ):
            found.append(f"run waits: no trainer of {policy} has joined")
        elif ledger.lacks_newest:
            found.append(f"run waits for the trainer of {policy} to offer version {ledger.newest_number} again")
        elif ledger.newest is None:
            found.append(f"run waits for the first version of {policy}")
        if ledger.offered_otherwise and not view.control.ended:
            found.append(_not_served(view, policy, ledger.newest_number))
        if view.versions.reached_threshold:
            continue
        if trained.batches.num_waiting and (num_due := trained.batches.late.num_waited_for):
            found.append(f"trainer {policy} waits for task groups that are due: {num_due}")
        elif trained.batches.num_waiting:
            have, need = trained.num_buffered, trained.config.fresh_size
            lacks = trained.lacks
            wanted = f"task groups of source {lacks}" if lacks else f"sequences: {have} of {need}"
            found.append(f"trainer {policy} waits for {wanted}")
        for source, count in trained.exhausted.items():
            found.append(
                f"batches of {policy} do without source {source}: its last {count} task groups gave nothing to train"
            )
    found += view.evaluations.progress()
    if view.dispatcher.waits_for:
        found.append(f"dispatcher waits: {view.dispatcher.waits_for}")
    return found


def _not_served(view: ProgressView, policy: str, number: int) -> str:
    """The wait for another version than the newest, which no trainer serves as it was recorded."""
    playing = sum(view.dispatcher.may_play(replica.held, {}, (policy,)) for replica in view.pool)
    told = f"version {number} of {policy} cannot be fetched: its trainer replayed the batch to other bits (not deterministic)"
    if playing:
        return (
            f"{told}; {playing} of {len(view.pool)} replicas hold a version to play on with until version {number + 1}"
        )
    return (
        f"{told}, and no replica holds a version that is new enough: stop the run and begin another one from its newest "
        "checkpoint (rollmill export RUN, then policies.<name>.model.path)"
    )


def _policy(view: ProgressView, policy: PolicyView) -> PolicyProgress:
    trainer = policy.trainer
    metrics = view.versions.last_metrics[policy.name]
    return PolicyProgress(
        policy=policy.name,
        version=policy.ledger.newest_number,
        num_steps=view.versions.last_step(policy.name),
        num_buffered=policy.num_buffered,
        num_expected=round(policy.account.expected),
        reward_mean=metrics.get(StepKey.ROLLOUT_REWARD_MEAN),
        staleness_max=int(metrics.get(StepKey.STALENESS_MAX, 0)),
        trainer_state=trainer.state if trainer is not None else "absent",
        metrics=metrics,
        quota=policy.account.quota,
    )


def _stall(view: ProgressView, stall: Stall) -> StallProgress:
    since = time.time() - (view.clock() - stall.since)
    return StallProgress(**{**by_name(stall), "cause": stall.cause.value, "since": since})


def _replicas(view: ProgressView) -> list[ReplicaProgress]:
    now = view.clock()
    return [
        ReplicaProgress(
            replica_id=replica.replica_id,
            num_slots=replica.num_slots,
            num_running=replica.num_running,
            tokens_per_s=replica.tokens_per_s,
            versions={policy: held.number for policy, held in replica.held.items()},
            lease_left_s=max(0.0, replica.lease_until - now),
            draining=replica.draining,
        )
        for replica in view.pool
    ]


def _of_checkpoints(view: ProgressView) -> dict[str, int]:
    """Reports of trainers about their checkpoints, where they have any."""
    found = {gauge.value: sum(int(t.gauges.get(gauge, 0)) for t in view.trainers) for gauge in CheckpointGauge}
    return {name: count for name, count in found.items() if count}

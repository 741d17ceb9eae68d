"""Where the run stands, as one record for people and tools, with who waits for whom. Reads the ring, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.accounts import AccountState
from services.common.checkpoints.gauges import CheckpointGauge
from services.common.fates import SetAsideReason
from services.orchestrator.forecast import DiskOutlook
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.ring import Ring
from services.orchestrator.run_control import RunState
from services.orchestrator.stalls.detector import Stall


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
    """A standstill; ``since`` in seconds since the epoch."""

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


def progress(ring: Ring) -> Progress:
    return Progress(
        at=time.time(),
        state=ring.control.state,
        policies=tuple(_policy(ring, name) for name in ring.trained_ledgers),
        replicas=tuple(_replicas(ring)),
        tokens_per_s=ring.pool.tokens_per_s,
        evaluations=tuple(ring.evaluations.results.values()),
        counters={**ring.counters, **_of_checkpoints(ring)},
        waits=tuple(waits(ring)),
        started_at=ring.started_at,
        stalls=tuple(_stall(ring, stall) for stall in ring.standing.stalls),
        accounts=ring.standing.book.totals(),
        disk=ring.disk,
        set_aside=ring.aside.counts(),
    )


def waits(ring: Ring) -> list[str]:
    """Who waits for whom, for people."""
    found: list[str] = []
    if ring.journal.blocked:
        found.append(f"journal waits for free disk: {ring.journal.blocked}")
    for policy, ledger in ring.ledgers.items():
        if policy not in ring.batches:
            if ledger.newest is None:
                found.append(f"run waits for a replica that serves {policy}")
            continue
        trainer = ring.trainers.get(policy)
        if trainer is None and not ring.control.ended and ledger.newest_number < ring.num_steps:
            found.append(f"run waits: no trainer of {policy} has joined")
        elif ledger.lacks_newest:
            found.append(f"run waits for the trainer of {policy} to offer version {ledger.newest_number} again")
        elif ledger.newest is None:
            found.append(f"run waits for the first version of {policy}")
        if ring.batches[policy].num_waiting and (num_due := ring.batches[policy].late.num_waited_for):
            found.append(f"trainer {policy} waits for task groups that are due: {num_due}")
        elif ring.batches[policy].num_waiting:
            have = ring.experience.buffers[policy].num_sequences
            need = ring.recipe.policies[policy].batch.fresh_size
            found.append(f"trainer {policy} waits for sequences: {have} of {need}")
    for name, resolved, total in ring.evaluations.progress():
        found.append(f"evaluation {name}: {resolved} of {total}")
    if ring.dispatcher.waits_for:
        found.append(f"dispatcher waits: {ring.dispatcher.waits_for}")
    return found


def _policy(ring: Ring, policy: str) -> PolicyProgress:
    trainer = ring.trainers.get(policy)
    metrics = ring.last_metrics[policy]
    return PolicyProgress(
        policy=policy,
        version=ring.ledgers[policy].newest_number,
        num_steps=ring.num_steps,
        num_buffered=ring.experience.buffers[policy].num_sequences,
        num_expected=round(ring.experience.admission.accounts[policy].expected),
        reward_mean=metrics.get("rollout_reward_mean"),
        staleness_max=int(metrics.get("staleness_max", 0)),
        trainer_state=trainer.state if trainer is not None else "absent",
        metrics=metrics,
        quota=ring.experience.admission.accounts[policy].quota,
    )


def _stall(ring: Ring, stall: Stall) -> StallProgress:
    return StallProgress(
        component=stall.component,
        cause=stall.cause.value,
        detail=stall.detail,
        since=time.time() - (ring.clock() - stall.since),
        advice=stall.advice,
        chain=stall.chain,
    )


def _replicas(ring: Ring) -> list[ReplicaProgress]:
    now = ring.clock()
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
        for replica in ring.pool
    ]


def _of_checkpoints(ring: Ring) -> dict[str, int]:
    """What trainers tell of their checkpoints, where there is something to tell."""
    found = {gauge.value: sum(int(t.gauges.get(gauge, 0)) for t in ring.trainers) for gauge in CheckpointGauge}
    return {name: count for name, count in found.items() if count}

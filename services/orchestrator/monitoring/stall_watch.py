"""Runs the stall detector once a second on the facts of the orchestrator, and writes its results to logs, metrics and
progress.

A stall changes no decision of the run, except that a lost order is sent again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from services.common.records.fates import RunCount
from services.common.telemetry.accounts import AccountState, Activity, PeerState
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import DISK, GATEWAY, INFERENCE, PERSON, Component, replica_id
from services.common.telemetry.components import replica as replica_component
from services.common.telemetry.components import trainer as trainer_component
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.metrics import StallMoment
from services.orchestrator.members.replica import Replica
from services.orchestrator.metrics.run_metrics import RunMetrics
from services.orchestrator.monitoring.views import StallView
from services.orchestrator.policy_view import PolicyView
from services.orchestrator.stalls.detector import Stall, StallDetector
from services.orchestrator.stalls.facts import (
    PAUSED_ITSELF,
    Cause,
    Facts,
    Hold,
    PolicyFacts,
    RefusedFacts,
    ReplicaFacts,
    TrainerFacts,
)

log = structlog.get_logger()
UNSEEN_REPORTS = 2  # one may cross the order on its way
_NONE: Mapping[str, int] = MappingProxyType({})


class StallWatch:
    def __init__(
        self,
        view: StallView,
        metrics: RunMetrics,
        counters: Counter[str],
        resend: Callable[[Replica], None],
        detector: StallDetector | None = None,
    ) -> None:
        """``resend`` sends a replica its orders again."""
        self._view = view
        self._state = view.stall_state
        self._metrics = metrics
        self._counters = counters
        self._resend = resend
        self._detector = detector or StallDetector()

    def look(self) -> None:
        """Run the detector; the caller does so once a second."""
        view = self._view
        self._state.account.enter(*own_activity(view))
        seen = facts(view)
        self._state.book.note(seen.accounts.values())
        change = self._detector.look(seen)
        self._state.stalls = self._detector.stalls
        for stall in change.begun:
            self._begun(stall)
        for stall in change.ended:
            seconds = round(self._view.clock() - stall.since, 1)
            log.info(LogEvent.RUN_UNSTALLED, component=stall.component, cause=stall.cause.value, seconds=seconds)
            self._metrics.stall(StallMoment.END, stall.component, stall.cause.value, stall.detail, seconds)

    def _begun(self, stall: Stall) -> None:
        seconds = round(self._view.clock() - stall.since, 1)
        log.warning(
            "run.stalled",
            component=stall.component,
            cause=stall.cause.value,
            detail=stall.detail,
            since=time.time() - seconds,
            seconds=seconds,
            chain=list(stall.chain),
            advice=stall.advice,
        )
        self._counters[RunCount.STALLS.value] += 1
        self._metrics.stall(StallMoment.BEGIN, stall.component, stall.cause.value, stall.detail, seconds)
        if stall.cause is Cause.ORDER_LOST:
            replica = self._view.pool.get(replica_id(stall.component))
            if replica is not None:
                self._resend(replica)  # repeating an order is harmless


def facts(view: StallView, wall: Callable[[], float] = time.time) -> Facts:
    control, peers = view.control, _peers(view)
    return Facts(
        now=view.clock(),
        wall=wall(),
        ended=control.ended,
        paused=control.paused and PAUSED_ITSELF.isdisjoint(view.dispatcher.holds),
        training=view.dispatcher.train,
        held_back=dict(view.dispatcher.holds),
        journal_blocked=view.journal.blocked,
        journal_oldest_s=view.journal.waiting_s,
        replicas=tuple(_replica(replica) for replica in view.pool),
        lost=dict(view.stall_state.lost),
        trainers=tuple(_trainer(view, policy) for policy in view.policies.values()) if view.versions.num_steps else (),
        policies=tuple(_policy(policy) for policy in view.policies.values()),
        accounts=_live_accounts(view, peers),
        peers=peers,
        failures_in_a_row=view.ingest.failures_in_a_row,
        last_failure=view.ingest.last_failure,
        refused=tuple(
            RefusedFacts(
                component=replica_component(sender),
                number=streak.number,
                since=streak.since,
                newest=streak.newest,
                detail=f"{streak.last.reason.value}: {streak.last.detail}",
            )
            for sender, streak in view.ingest.refusals.streaks.items()
        ),
        group_size=view.group_size,
        nothing_to_play=view.training_orders.nothing_to_play and view.dispatcher.train,
        progress=_progress(view),
    )


def own_activity(view: StallView) -> Activity:
    """The orchestrator's activity: the component that the run waits for."""
    control, holds = view.control, view.dispatcher.holds
    if control.ended:
        return Activity(ActivityName.RUN_ENDED)
    if not PAUSED_ITSELF.isdisjoint(holds) or control.paused:
        return Activity(ActivityName.PAUSED, PERSON)
    if Hold.DISK in holds or view.journal.blocked:
        return Activity(ActivityName.WAITING_FOR_DISK, DISK)
    if Hold.GATEWAY in holds:
        return Activity(ActivityName.WAITING_FOR_GATEWAY_TO_JOIN, GATEWAY)
    if not any(replica.takes_work for replica in view.pool):
        return Activity(ActivityName.WAITING_FOR_REPLICA, INFERENCE)
    if missing := [policy for policy, ledger in view.ledgers.items() if ledger.newest is None]:
        return Activity(
            ActivityName.WAITING_FOR_FIRST_VERSION,
            trainer_component(missing[0]) if missing[0] in view.policies else INFERENCE,
        )
    full = [policy for policy in view.policies.values() if policy.quota_full]
    if full and len(full) == len(view.policies):
        fullest = max(full, key=lambda policy: policy.account.fullness)
        return Activity(ActivityName.WAITING_FOR_QUOTA, trainer_component(fullest.name))
    busiest = max(view.pool, key=lambda replica: replica.num_running, default=None)
    if busiest is not None and busiest.num_running:
        return Activity(ActivityName.WAITING_FOR_ROLLOUTS, busiest.component)
    return Activity(ActivityName.NOTHING_TO_DO)


def _replica(replica: Replica) -> ReplicaFacts:
    return ReplicaFacts(
        component=replica.component,
        num_reports=replica.num_reports,
        num_running=replica.num_running,
        stream_open=replica.mailbox is not None,
        unseen_orders=tuple([assignment.since for assignment in replica.unseen(UNSEEN_REPORTS)]),
        untaken={policy: replica.held[policy].number for policy in replica.moving} if replica.moving else _NONE,
        peers=replica.peers,
    )


def _trainer(view: StallView, policy: PolicyView) -> TrainerFacts:
    trainer = policy.trainer
    return TrainerFacts(
        policy=policy.name,
        wanted=policy.ledger.newest_number < view.versions.last_step(policy.name),
        joined=trainer is not None,
        num_reports=trainer.num_reports if trainer is not None else 0,
        state=trainer.state if trainer is not None else "",
        refusal=trainer.refusal if trainer is not None else "",
        num_ranks=trainer.num_ranks if trainer is not None else 1,
        rank_reports=dict(trainer.rank_reports) if trainer is not None else {},
    )


def _policy(policy: PolicyView) -> PolicyFacts:
    return PolicyFacts(
        policy=policy.name,
        batch_size=policy.config.fresh_size,
        num_kept=policy.experience.num_kept[policy.name],
        num_filtered=policy.experience.num_filtered[policy.name],
        num_filtered_in_a_row=policy.experience.num_filtered_in_a_row[policy.name],
        quota_full=policy.quota_full,
    )


def _live_accounts(view: StallView, peers: Mapping[Component, PeerState]) -> dict[Component, AccountState]:
    """Accounts of the orchestrator and of components with a lease; older reports do not describe the present."""
    told = [account for replica in view.pool for account in replica.accounts]
    told += [account for trainer in view.trainers for accounts in trainer.accounts.values() for account in accounts]
    told += [account for peer in peers.values() for account in peer.accounts]
    told.append(view.stall_state.account.state())
    return {account.component: account for account in told}


def _peers(view: StallView) -> dict[Component, PeerState]:
    """Dependencies of components, each by the report of the component with the best view. Publishers are of their
    trainer's lease."""
    found: dict[Component, PeerState] = {}
    told = [peer for replica in view.pool for peer in replica.peers]
    told += [peer for trainer in view.trainers for peer in trainer.peers]
    for peer in told:
        known = found.get(peer.component)
        if known is None or peer.silent_s < known.silent_s:
            found[peer.component] = peer
    return found


def _progress(view: StallView) -> dict[str, float]:
    """Counters that grow while any part of the run makes progress."""
    found = {"records": float(view.ingest.num_durable)}
    for name, policy in view.policies.items():
        found |= {
            f"{name}/version": float(policy.ledger.newest_number),
            f"{name}/batch": policy.batches.newest_step,
        }
    for replica in view.pool:
        for account in replica.accounts:
            found[f"{account.component}/done"] = float(account.progress)
        found[f"{replica.replica_id}/tokens"] = float(replica.num_tokens)
    for trainer in view.trainers:
        found |= {f"{a.component}/done": float(a.progress) for accounts in trainer.accounts.values() for a in accounts}
        found |= {f"{trainer.policy}/checkpoint": float(trainer.checkpoint_step)}
    return found

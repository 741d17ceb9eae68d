"""The ring as facts for the detector, and what the orchestrator itself waits for. Reads the ring, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.accounts import AccountState, Activity, PeerState
from services.orchestrator.pool import Replica
from services.orchestrator.ring import Ring
from services.orchestrator.stalls.facts import (
    GATEWAY,
    Facts,
    PolicyFacts,
    RefusedFacts,
    ReplicaFacts,
    TrainerFacts,
)

UNSEEN_REPORTS = 2  # one may cross the order on its way


def facts(ring: Ring, wall: Callable[[], float] = time.time) -> Facts:
    control = ring.control
    return Facts(
        now=ring.clock(),
        wall=wall(),
        ended=control.ended,
        paused=control.paused and "failures" not in ring.dispatcher.holds,
        training=ring.dispatcher.train,
        held_back=dict(ring.dispatcher.holds),
        journal_blocked=ring.journal.blocked,
        journal_oldest_s=ring.journal.waiting_s,
        replicas=tuple(_replica(replica) for replica in ring.pool),
        lost=dict(ring.standing.lost),
        trainers=tuple(_trainer(ring, policy) for policy in ring.trained_ledgers) if ring.num_steps else (),
        policies=tuple(_policy(ring, policy) for policy in ring.trained_ledgers),
        accounts=_live_accounts(ring),
        peers=_peers(ring),
        failures_in_a_row=ring.ingest.failures_in_a_row,
        last_failure=ring.ingest.last_failure,
        refused=tuple(
            RefusedFacts(
                component=f"replica/{sender}",
                number=streak.number,
                since=streak.since,
                newest=streak.newest,
                detail=f"{streak.last.reason.value}: {streak.last.detail}",
            )
            for sender, streak in ring.ingest.refusals.streaks.items()
        ),
        group_size=ring.recipe.rollout.group_size,
        nothing_to_play=ring.training_orders.nothing_to_play and ring.dispatcher.train,
        progress=_progress(ring),
    )


def own_activity(ring: Ring) -> Activity:
    """What the orchestrator is in: whom the run, seen from here, waits for."""
    control, holds = ring.control, ring.dispatcher.holds
    if control.ended:
        return Activity("the run has ended")
    if "failures" in holds or control.paused:
        return Activity("paused", "person")
    if "disk" in holds or ring.journal.blocked:
        return Activity("waiting for free disk", "disk")
    if GATEWAY in holds:
        return Activity("waiting for the environment gateway to join", GATEWAY)
    if not any(replica.takes_work for replica in ring.pool):
        return Activity("waiting for a replica", "inference")
    if missing := [policy for policy, ledger in ring.ledgers.items() if ledger.newest is None]:
        return Activity(
            "waiting for the first version", f"trainer/{missing[0]}" if missing[0] in ring.batches else "inference"
        )
    full = [policy for policy in ring.trained_ledgers if _quota_full(ring, policy)]
    if full and len(full) == len(ring.trained_ledgers):
        fullest = max(full, key=lambda policy: ring.experience.admission.accounts[policy].fullness)
        return Activity("waiting for room in the quota", f"trainer/{fullest}")
    busiest = max(ring.pool, key=lambda replica: replica.num_running, default=None)
    if busiest is not None and busiest.num_running:
        return Activity("waiting for rollouts", f"replica/{busiest.replica_id}")
    return Activity("nothing to do")


def _replica(replica: Replica) -> ReplicaFacts:
    return ReplicaFacts(
        component=f"replica/{replica.replica_id}",
        num_reports=replica.num_reports,
        num_running=replica.num_running,
        stream_open=replica.mailbox is not None,
        unseen_orders=tuple(
            a.since for a in replica.assignments.values() if a.num_unseen >= UNSEEN_REPORTS and not a.seen
        ),
        untaken={
            policy: replica.held[policy].number
            for policy, (told, _) in replica.announced.items()
            if policy in replica.held and replica.held[policy].number < told
        },
        peers=replica.peers,
    )


def _trainer(ring: Ring, policy: str) -> TrainerFacts:
    trainer = ring.trainers.get(policy)
    return TrainerFacts(
        policy=policy,
        wanted=ring.ledgers[policy].newest_number < ring.num_steps,
        joined=trainer is not None,
        num_reports=trainer.num_reports if trainer is not None else 0,
        state=trainer.state if trainer is not None else "",
        num_ranks=trainer.num_ranks if trainer is not None else 1,
        rank_reports=dict(trainer.rank_reports) if trainer is not None else {},
    )


def _policy(ring: Ring, policy: str) -> PolicyFacts:
    experience = ring.experience
    return PolicyFacts(
        policy=policy,
        batch_size=ring.recipe.policies[policy].batch.fresh_size,
        num_kept=experience.num_kept[policy],
        num_filtered_in_a_row=experience.num_filtered_in_a_row[policy],
        quota_full=_quota_full(ring, policy),
    )


def _quota_full(ring: Ring, policy: str) -> bool:
    admission = ring.experience.admission
    return admission.accounts[policy].steps_left > 0 and not admission.has_room(policy)


def _live_accounts(ring: Ring) -> dict[str, AccountState]:
    """Of those that hold a lease, and of the orchestrator; what others once reported says nothing about now."""
    found: dict[str, AccountState] = {}
    for replica in ring.pool:
        found |= {account.component: account for account in replica.accounts}
    for trainer in ring.trainers:
        found |= {account.component: account for accounts in trainer.accounts.values() for account in accounts}
    for peer in _peers(ring).values():
        found |= {account.component: account for account in peer.accounts}
    own = ring.standing.account.state()
    return found | {own.component: own}


def _peers(ring: Ring) -> dict[str, PeerState]:
    """What components depend on, as whoever hears it best sees it. Publishers are of their trainer's lease."""
    found: dict[str, PeerState] = {}
    told = [peer for replica in ring.pool for peer in replica.peers]
    told += [peer for trainer in ring.trainers for peer in trainer.peers]
    for peer in told:
        known = found.get(peer.component)
        if known is None or peer.silent_s < known.silent_s:
            found[peer.component] = peer
    return found


def _progress(ring: Ring) -> dict[str, float]:
    """Counters that grow while anything of the run goes on."""
    found = {"records": float(ring.ingest.num_durable)}
    for policy, batches in ring.batches.items():
        found |= {
            f"{policy}/version": float(ring.ledgers[policy].newest_number),
            f"{policy}/batch": batches.newest_step,
        }
    for replica in ring.pool:
        found |= {f"{a.component}/done": float(a.progress) for a in replica.accounts}
        found |= {f"{replica.replica_id}/tokens": float(replica.num_tokens)}
    for trainer in ring.trainers:
        found |= {f"{a.component}/done": float(a.progress) for accounts in trainer.accounts.values() for a in accounts}
        found |= {f"{trainer.policy}/checkpoint": float(trainer.checkpoint_step)}
    return found

"""Rules about who is there: replicas, trainers and their ranks, publishers, the gateway and what it needs.

Each rule is ``(facts, patience) -> findings``. These see a cause directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.accounts import PeerState
from services.orchestrator.stalls.causes import Cause
from services.orchestrator.stalls.facts import GATEWAY, Facts, Finding
from services.orchestrator.stalls.patience import LEAST_S, Patience

REPORT_MOST_S = 15.0  # reports come every two seconds, however long the work takes
ABSENT_S = 60.0  # processes load models before they join
SETTLE_S = 4.0  # what a gauge says must hold this long: connections come and go


def silent_peers(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Whoever reports every two seconds and does not: replicas, trainers, ranks."""
    reporters = [(r.component, r.num_reports) for r in facts.replicas]
    for trainer in facts.trainers:
        if trainer.joined:
            name = f"trainer/{trainer.policy}"
            reporters.append((name, trainer.num_reports))
            reporters += [(f"{name}/rank{rank}", count) for rank, count in trainer.rank_reports.items()]
    for component, count in reporters:
        since = patience.overdue(("report", component), count, facts.now, unknown_s=LEAST_S, most_s=REPORT_MOST_S)
        if since is not None:
            yield Finding(
                component=component,
                cause=Cause.SILENT,
                detail=f"it has not reported for {facts.now - since:.0f} s",
                since=since,
            )


def lost_peers(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Whose lease ran out while something was wanted of it, until it is back or nobody misses it."""
    for component, since in facts.lost.items():
        if component.startswith("replica/") and any(replica.stream_open for replica in facts.replicas):
            continue  # others play on: what it had was issued again
        yield Finding(
            component=component, cause=Cause.LOST, detail="its lease ran out and it has not come back", since=since
        )


def absent_peers(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Who has never come, though nothing goes on without it."""
    for trainer in facts.trainers:
        name = f"trainer/{trainer.policy}"
        missing = trainer.wanted and not trainer.joined and name not in facts.lost and not facts.ended
        since = patience.holds(("absent", name), missing, facts.now, ABSENT_S)
        if since is not None:
            yield Finding(component=name, cause=Cause.ABSENT, detail="no trainer has joined", since=since)
    missing = not facts.replicas and not any(c.startswith("replica/") for c in facts.lost) and not facts.ended
    since = patience.holds(("absent", "inference"), missing, facts.now, ABSENT_S)
    if since is not None:
        yield Finding(component="inference", cause=Cause.ABSENT, detail="no replica has joined", since=since)
    away = facts.held_back.get(GATEWAY, "")
    since = patience.holds(("absent", GATEWAY), bool(away) and not facts.ended, facts.now, ABSENT_S)
    if since is not None:
        yield Finding(component=GATEWAY, cause=Cause.ABSENT, detail=away, since=since)


def silent_dependencies(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """What others ask and hear nothing from: publishers and the gateway. As whoever hears them best sees them, and when
    some hear the gateway and others do not, the way there of those."""
    for peer in facts.peers.values():
        if peer.silent_s > LEAST_S:
            yield Finding(
                component=peer.component,
                cause=Cause.SILENT,
                detail=f"nobody has heard of it for {peer.silent_s:.0f} s: {peer.detail}",
                since=facts.now - peer.silent_s,
            )
    best = facts.peers.get(GATEWAY)
    for replica in facts.replicas:
        for peer in replica.peers:
            if peer.component == GATEWAY and peer.silent_s > LEAST_S and best is not None and best.silent_s <= LEAST_S:
                yield Finding(
                    component=replica.component,
                    cause=Cause.UNREACHABLE,
                    detail=f"it does not reach the gateway, which others do: {peer.detail}",
                    since=facts.now - peer.silent_s,
                )


def queue_of_the_gateway(facts: Facts, patience: Patience) -> Iterator[Finding]:
    """Redis, workers and slots behind a gateway that answers."""
    gateway = facts.peers.get(GATEWAY)
    if gateway is None or gateway.silent_s > 0.0:
        return
    away = gateway.gauges.get("queue_redis_connected", 1.0) == 0.0
    since = patience.holds("redis", away, facts.now, SETTLE_S)
    if since is not None:
        yield Finding(
            component="redis", cause=Cause.UNREACHABLE, detail="the gateway does not reach its queue", since=since
        )
        return
    alone = gateway.gauges.get("queue_workers", 1.0) == 0.0 and _waiting(gateway) > 0
    since = patience.holds("workers", alone, facts.now, SETTLE_S)
    if since is not None:
        yield Finding(
            component=f"{GATEWAY}/workers",
            cause=Cause.NO_WORKERS,
            detail=f"{_waiting(gateway):.0f} programs wait and no worker is there",
            since=since,
        )


def _waiting(gateway: PeerState) -> float:
    return gateway.gauges.get("queue_unanswered", 0.0) + sum(
        count for name, count in gateway.gauges.items() if name.startswith("queue_") and name.endswith("_waiting")
    )

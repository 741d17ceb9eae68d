"""Rules about absent components: replicas, trainers and their ranks, publishers, the gateway and its dependencies.

Each rule is ``(facts, timeouts) -> findings``. These rules see a cause directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.telemetry.accounts import PeerState
from services.common.telemetry.components import GATEWAY, GATEWAY_WORKERS, INFERENCE, REDIS, is_of_replica
from services.common.telemetry.components import trainer as trainer_component
from services.common.telemetry.gateway_queue import QueueGauge, num_waiting
from services.orchestrator.stalls.adaptive_timeouts import LEAST_S, AdaptiveTimeouts
from services.orchestrator.stalls.facts import Cause, Facts, Finding, Hold

REPORT_MOST_S = 15.0  # reports come every two seconds, however long the work takes
ABSENT_S = 60.0  # processes load models before they join
SETTLE_S = 4.0  # a gauge must keep its value this long: connections come and go


def silent_peers(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find silent replicas, trainers and ranks: each must report every two seconds."""
    reporters = [(r.component, r.num_reports) for r in facts.replicas]
    for trainer in facts.trainers:
        if trainer.joined:
            name = trainer_component(trainer.policy)
            reporters.append((name, trainer.num_reports))
            reporters += [
                (trainer_component(trainer.policy, rank), count) for rank, count in trainer.rank_reports.items()
            ]
    for component, count in reporters:
        since = timeouts.overdue(("report", component), count, facts.now, unknown_s=LEAST_S, most_s=REPORT_MOST_S)
        if since is not None:
            yield Finding(
                component=component,
                cause=Cause.SILENT,
                detail=f"no report for {facts.now - since:.0f} s",
                since=since,
            )


def lost_peers(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find components with a lost lease and unfinished work, until they come back or the work is reassigned."""
    for component, since in facts.lost.items():
        if is_of_replica(component) and any(replica.stream_open for replica in facts.replicas):
            continue  # other replicas continue: the dispatcher issued the task groups again
        yield Finding(
            component=component,
            cause=Cause.LOST,
            detail="its lease ended and the component has not returned",
            since=since,
        )


def absent_peers(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find required components that have never joined."""
    for trainer in facts.trainers:
        name = trainer_component(trainer.policy)
        missing = trainer.wanted and not trainer.joined and name not in facts.lost and not facts.ended
        since = timeouts.holds(("absent", name), missing, facts.now, ABSENT_S)
        if since is not None:
            yield Finding(component=name, cause=Cause.ABSENT, detail="no trainer has joined", since=since)
    missing = not facts.replicas and not any(is_of_replica(c) for c in facts.lost) and not facts.ended
    since = timeouts.holds(("absent", INFERENCE), missing, facts.now, ABSENT_S)
    if since is not None:
        yield Finding(component=INFERENCE, cause=Cause.ABSENT, detail="no replica has joined", since=since)
    away = facts.held_back.get(Hold.GATEWAY, "")
    since = timeouts.holds(("absent", GATEWAY), bool(away) and not facts.ended, facts.now, ABSENT_S)
    if since is not None:
        yield Finding(component=GATEWAY, cause=Cause.ABSENT, detail=away, since=since)


def silent_dependencies(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Find publishers and gateways that do not answer, by the reports of the component with the best view. When only
    some components reach the gateway, blame the connection of the others."""
    for peer in facts.peers.values():
        if peer.silent_s > LEAST_S:
            yield Finding(
                component=peer.component,
                cause=Cause.SILENT,
                detail=f"no component has reached it for {peer.silent_s:.0f} s: {peer.detail}",
                since=facts.now - peer.silent_s,
            )
    best = facts.peers.get(GATEWAY)
    for replica in facts.replicas:
        for peer in replica.peers:
            if peer.component == GATEWAY and peer.silent_s > LEAST_S and best is not None and best.silent_s <= LEAST_S:
                yield Finding(
                    component=replica.component,
                    cause=Cause.UNREACHABLE,
                    detail=f"this replica does not reach the gateway, other replicas do: {peer.detail}",
                    since=facts.now - peer.silent_s,
                )


def queue_of_the_gateway(facts: Facts, timeouts: AdaptiveTimeouts) -> Iterator[Finding]:
    """Redis, workers and slots behind a gateway that answers."""
    gateway = facts.peers.get(GATEWAY)
    if gateway is None or gateway.silent_s > 0.0:
        return
    away = gateway.gauges.get(QueueGauge.REDIS_CONNECTED, 1.0) == 0.0
    since = timeouts.holds("redis", away, facts.now, SETTLE_S)
    if since is not None:
        yield Finding(
            component=REDIS, cause=Cause.UNREACHABLE, detail="the gateway does not reach its queue", since=since
        )
        return
    alone = gateway.gauges.get(QueueGauge.WORKERS, 1.0) == 0.0 and _waiting(gateway) > 0
    since = timeouts.holds("workers", alone, facts.now, SETTLE_S)
    if since is not None:
        yield Finding(
            component=GATEWAY_WORKERS,
            cause=Cause.NO_WORKERS,
            detail=f"{_waiting(gateway):.0f} programs wait and no worker is there",
            since=since,
        )


def _waiting(gateway: PeerState) -> float:
    return gateway.gauges.get(QueueGauge.UNANSWERED, 0.0) + num_waiting(gateway.gauges)

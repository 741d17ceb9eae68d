"""Gives every consumer its parts of the core. The only module that reads the core's parts.

Each function makes one consumer. Consumers name the parts that they need, import no core, and know no other part.
"""

from __future__ import annotations

from services.orchestrator.core import OrchestratorCore
from services.orchestrator.dispatch.retry_limit import GoneVersions, OverdueGroups
from services.orchestrator.lifecycle import RunParts
from services.orchestrator.metrics.run_metrics import Summary
from services.orchestrator.monitoring.failure_pause import FailurePause
from services.orchestrator.monitoring.progress import waits
from services.orchestrator.monitoring.stall_watch import StallWatch
from services.orchestrator.monitoring.views import ProgressView, StallView
from services.orchestrator.monitoring.watch import Collector, ThroughputRows, Watch
from services.orchestrator.recovery.parts import RecoveryParts


def recovery_parts(core: OrchestratorCore) -> RecoveryParts:
    return RecoveryParts(
        aside=core.aside,
        batch_configs={name: policy.config for name, policy in core.policies.items()},
        batches=core.batches,
        bounds=core.bounds,
        control=core.control,
        counters=core.counters,
        dispatcher=core.dispatcher,
        evaluations=core.evaluations,
        events=core,
        experience=core.experience,
        groups=core.groups,
        ingest=core.ingest,
        journal=core.journal,
        judged_before=core.judged_before,
        ledgers=core.ledgers,
        names=core.names,
        pool=core.pool,
        timeline=core.timeline,
        training_orders=core.training_orders,
        versions=core.versions,
    )


def run_parts(core: OrchestratorCore) -> RunParts:
    """For ``lifecycle.live``."""
    return RunParts(
        control=core.control,
        evaluation=core.recipe.evaluation,
        evaluations=core.evaluations,
        events=core,
        ledgers=core.ledgers,
        metrics=core.metrics,
        run_dir=core.run_dir,
        summary=Summary(
            run_id=core.run_id,
            started_at=core.started_at,
            control=core.control,
            trained_ledgers=core.versions.trained_ledgers,
            evaluations=core.evaluations,
            threshold=core.threshold,
            timeline=core.timeline,
            batches=core.batches,
            counters=core.counters,
            book=core.stall_state.book,
        ),
        threshold=core.threshold,
        versions=core.versions,
    )


# --- monitoring ------------------------------------------------------------------------------------------------------


def progress_view(core: OrchestratorCore) -> ProgressView:
    return ProgressView(
        aside=core.aside,
        clock=core.clock,
        control=core.control,
        counters=core.counters,
        disk=core.disk,
        dispatcher=core.dispatcher,
        evaluations=core.evaluations,
        journal=core.journal,
        ledgers=core.ledgers,
        masked=core.masked,
        policies=core.policies,
        pool=core.pool,
        stall_state=core.stall_state,
        started_at=core.started_at,
        threshold=core.threshold,
        timeline=core.timeline,
        trainers=core.trainers,
        versions=core.versions,
    )


def stall_view(core: OrchestratorCore) -> StallView:
    return StallView(
        clock=core.clock,
        control=core.control,
        dispatcher=core.dispatcher,
        group_size=core.recipe.rollout.group_size,
        ingest=core.ingest,
        journal=core.journal,
        ledgers=core.ledgers,
        policies=core.policies,
        pool=core.pool,
        stall_state=core.stall_state,
        trainers=core.trainers,
        training_orders=core.training_orders,
        versions=core.versions,
    )


def stall_watch(core: OrchestratorCore) -> StallWatch:
    return StallWatch(stall_view(core), core.metrics, core.counters, core.dispatcher.rejoined)


def watch(core: OrchestratorCore) -> Watch:
    config, view = core.recipe.orchestrator, progress_view(core)
    return Watch(
        absences=core.absences,
        collector=_collector(core) if config.retention == "needed" else None,
        failures=_failure_pause(core),
        gone_versions=GoneVersions(
            core.ledgers, core.pool, core.dispatcher, core.evaluations, core.abandon_evaluations, core.clock
        ),
        overdue=OverdueGroups(core.pool, core.retry_limit, core.recipe.rollout, core.counters, core.clock),
        stalls=stall_watch(core),
        throughput=ThroughputRows(
            pool=core.pool,
            trained_ledgers=core.versions.trained_ledgers,
            book=core.stall_state.book,
            metrics=core.metrics,
            waits=lambda: waits(view),
            clock=core.clock,
        ),
        book=core.stall_state.book,
        counters=core.counters,
        disk=core.disk,
        dispatcher=core.dispatcher,
        journal=core.journal,
        metrics=core.metrics,
        min_free_bytes=config.min_free_bytes,
        pool=core.pool,
        run_dir=core.run_dir,
        timeline=core.timeline,
        trainers=core.trainers,
        write_state=core.write_state,
        clock=core.clock,
    )


def _collector(core: OrchestratorCore) -> Collector:
    return Collector(core.journal, core.trainers, len(core.versions.trained_ledgers), core.live_groups)


def _failure_pause(core: OrchestratorCore) -> FailurePause:
    return FailurePause(
        core.control,
        core.dispatcher,
        core.ingest,
        core.masked,
        core.pool,
        core.trainers,
        core.counters,
        group_size=core.recipe.rollout.group_size,
        pause=core.pause,
        resume=core.resume,
        clock=core.clock,
    )

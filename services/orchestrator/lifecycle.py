"""The run from its first version to its last: evaluate, train until the last step or the threshold, evaluate, finish.

    STARTING -> EVALUATING_START -> TRAINING -> EVALUATING_END -> FINISHED
        '--------------- StopRun at any time ------------------> STOPPED

Each phase is a condition on durable data, so a restarted orchestrator passes finished phases at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import structlog

from services.common import run_files
from services.common.config.data import EvaluationConfig
from services.common.records import fates
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.summary import RunSummary
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.published_versions import PublishedVersions
from services.orchestrator.dispatch.threshold import END, START, Threshold, evaluation_of
from services.orchestrator.metrics import RunMetrics
from services.orchestrator.state.run_control import RunControl, RunState
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()


class RunEvents(Protocol):
    """What the lifecycle causes in the rest of the orchestrator."""

    async def until(self, condition: Callable[[], bool]) -> None: ...

    async def begin_evaluation(self, evaluation_id: str) -> None: ...

    def begin_training(self) -> None: ...

    def stop_issuing(self) -> None: ...

    def end_training(self, reason: fates.ClosedReason) -> None: ...

    def cancel_training_groups(self, reason: fates.ClosedReason) -> None: ...

    def skip_evaluations(self) -> None: ...

    def save_checkpoints(self) -> None: ...

    def dismiss(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of the orchestrator that decide the phase of the run, and those that record its end."""

    control: RunControl
    evaluation: EvaluationConfig
    evaluations: Evaluations
    events: RunEvents
    ledgers: Mapping[str, VersionLedger]
    metrics: RunMetrics
    run_dir: Path
    summary: Callable[[], RunSummary]
    threshold: Threshold | None
    versions: PublishedVersions


async def live(run: RunParts) -> None:
    """Return when the run has ended, finished or stopped."""
    if not run.control.ended:
        phases = asyncio.ensure_future(_phases(run))
        stop = asyncio.ensure_future(run.control.stop_requested.wait())
        try:
            await asyncio.wait({phases, stop}, return_when=asyncio.FIRST_COMPLETED)
            if phases.done():
                phases.result()
        finally:
            phases.cancel()
            stop.cancel()
        run.events.end_training(fates.ClosedReason.RUN_ENDED)
        run.control.enter(RunState.STOPPED if run.control.stop_requested.is_set() else RunState.FINISHED)
        run.metrics.summary(run.summary())
    elif not run_files.summary(run.run_dir).is_file():  # an earlier process died between the two
        run.metrics.summary(run.summary())
    done = "the threshold is reached" if run.versions.reached_threshold else fates.ClosedReason.STEPS_DONE.value
    reason = run.control.stop_reason or done
    log.info(LogEvent.RUN_ENDED, state=run.control.phase.value, reason=reason)
    run.events.dismiss(reason)


async def _phases(run: RunParts) -> None:
    evaluation = run.evaluation
    await run.events.until(lambda: all(ledger.newest is not None for ledger in run.ledgers.values()))
    if evaluation.at_start and not run.evaluations.finished(START) and not _trained(run):
        run.control.enter(RunState.EVALUATING_START)
        await run.events.begin_evaluation(START)
        await run.events.until(lambda: run.evaluations.finished(START))
    if not run.versions.all_trained:
        run.control.enter(RunState.TRAINING)
        run.events.begin_training()
        await _train(run)
        await _finish_begun_steps(run)
    run.events.cancel_training_groups(fates.ClosedReason.STEPS_DONE)
    if run.versions.ended_early:
        run.events.save_checkpoints()  # beside the last evaluation, and not when all must leave soon
    if evaluation.at_end:
        run.events.skip_evaluations()
    if evaluation.at_end and not run.evaluations.finished(END):
        run.control.enter(RunState.EVALUATING_END)
        await run.events.begin_evaluation(END)
        await run.events.until(lambda: run.evaluations.finished(END))
    # Requested evaluations are part of the run.
    await run.events.until(lambda: not run.evaluations.running)


async def _train(run: RunParts) -> None:
    """Wait until every policy has taken its last step or the threshold is reached; starts evaluations that run in
    parallel."""

    def over() -> bool:
        return run.versions.reached_threshold or run.versions.all_trained

    while not over():
        due = _due_evaluation(run)
        if due is not None:
            await run.events.begin_evaluation(due)
        await run.events.until(lambda: over() or _due_evaluation(run) is not None)


async def _finish_begun_steps(run: RunParts) -> None:
    """Begin no further step, and cancel the work for one; trainers still train the batches that they hold."""
    run.events.stop_issuing()
    if run.versions.reached_threshold:
        assert run.threshold is not None
        log.info("run.threshold_reached", **asdict(run.threshold.state()))
        run.metrics.threshold(run.threshold.state())
        run.events.cancel_training_groups(fates.ClosedReason.STEPS_DONE)
        await run.events.until(lambda: run.versions.all_trained)


def _due_evaluation(run: RunParts) -> str | None:
    """The evaluation to begin, named after the step that it evaluates. One at a time: when a slow one covered the next
    multiple, the following one is of the step reached by then."""
    every = run.evaluation.every
    reached = min(ledger.newest_number for ledger in run.versions.trained_ledgers.values())
    if not every or run.evaluations.running or reached >= run.versions.num_steps:
        return None
    step = reached // every * every
    return evaluation_of(reached) if step > run.evaluations.newest_step() else None


def _trained(run: RunParts) -> bool:
    """Whether training has begun: then the starting version cannot be evaluated any more."""
    return any(ledger.newest_number > 0 for ledger in run.ledgers.values())

"""The run from its first version to its last: evaluate, train until the last step or the threshold, evaluate, finish.

    STARTING -> EVALUATING_START -> TRAINING -> EVALUATING_END -> FINISHED
        '--------------- StopRun at any time ------------------> STOPPED

Each phase is a condition on durable data, so a restarted orchestrator passes finished phases at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import structlog

from services.common import records, run_files
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import RowKind
from services.orchestrator.evaluation import END, START, evaluation_of
from services.orchestrator.groups import RunState
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.progress import summary

log = structlog.get_logger()


async def live(core: OrchestratorCore) -> None:
    """Return when the run has ended, finished or stopped."""
    if not core.control.ended:
        phases = asyncio.ensure_future(_phases(core))
        stop = asyncio.ensure_future(core.control.stop_requested.wait())
        try:
            await asyncio.wait({phases, stop}, return_when=asyncio.FIRST_COMPLETED)
            if phases.done():
                phases.result()
        finally:
            phases.cancel()
            stop.cancel()
        core.dispatcher.train = False
        core.cancel_training_groups(records.ClosedReason.RUN_ENDED)
        core.control.enter(RunState.STOPPED if core.control.stop_requested.is_set() else RunState.FINISHED)
        core.metrics.summary(summary(core))
    elif not run_files.summary(core.run_dir).is_file():  # an earlier process died between the two
        core.metrics.summary(summary(core))
    done = "the threshold is reached" if core.reached_threshold else records.ClosedReason.STEPS_DONE.value
    reason = core.control.stop_reason or done
    log.info(LogEvent.RUN_ENDED, state=core.control.phase.value, reason=reason)
    core.dismiss(reason)


async def _phases(core: OrchestratorCore) -> None:
    evaluation = core.recipe.evaluation
    await core.until(lambda: all(ledger.newest is not None for ledger in core.ledgers.values()))
    if evaluation.at_start and not core.evaluations.finished(START) and not _trained(core):
        core.control.enter(RunState.EVALUATING_START)
        await core.begin_evaluation(START)
        await core.until(lambda: core.evaluations.finished(START))
    if not core.all_trained:
        core.control.enter(RunState.TRAINING)
        core.begin_training()
        await _train(core)
        await _finish_begun_steps(core)
    core.cancel_training_groups(records.ClosedReason.STEPS_DONE)
    if core.ended_early:
        core.save_checkpoints()  # beside the last evaluation, and not when all must leave soon
    if evaluation.at_end:
        core.skip_evaluations()
    if evaluation.at_end and not core.evaluations.finished(END):
        core.control.enter(RunState.EVALUATING_END)
        await core.begin_evaluation(END)
        await core.until(lambda: core.evaluations.finished(END))
    # Requested evaluations are part of the run.
    await core.until(lambda: not core.evaluations.passes)


async def _train(core: OrchestratorCore) -> None:
    """Wait until every policy has taken its last step or the threshold is reached; starts evaluations that run in
    parallel."""

    def over() -> bool:
        return core.reached_threshold or core.all_trained

    while not over():
        due = _due_evaluation(core)
        if due is not None:
            await core.begin_evaluation(due)
        await core.until(lambda: over() or _due_evaluation(core) is not None)


async def _finish_begun_steps(core: OrchestratorCore) -> None:
    """Begin no further step, and cancel the work for one; trainers still train the batches that they hold."""
    core.dispatcher.train = False
    if core.reached_threshold:
        assert core.threshold is not None
        log.info("run.threshold_reached", **asdict(core.threshold.state()))
        core.metrics.row(RowKind.THRESHOLD, **asdict(core.threshold.state()))  # repeated after a restart
        core.cancel_training_groups(records.ClosedReason.STEPS_DONE)
        await core.until(lambda: core.all_trained)


def _due_evaluation(core: OrchestratorCore) -> str | None:
    """The evaluation to begin, named after the step that it evaluates. One at a time: when a slow one covered the next
    multiple, the following one is of the step reached by then."""
    every = core.recipe.evaluation.every
    reached = min(ledger.newest_number for ledger in core.trained_ledgers.values())
    if not every or core.evaluations.passes or reached >= core.num_steps:
        return None
    step = reached // every * every
    return evaluation_of(reached) if step > core.evaluations.newest_step() else None


def _trained(core: OrchestratorCore) -> bool:
    """Whether training has begun: then the starting version cannot be evaluated any more."""
    return any(ledger.newest_number > 0 for ledger in core.ledgers.values())

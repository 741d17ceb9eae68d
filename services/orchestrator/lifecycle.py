"""The run from its first version to its last: evaluate, train, evaluate, finish.

    STARTING -> EVALUATING_START -> TRAINING -> EVALUATING_END -> FINISHED
        '--------------- StopRun at any time ------------------> STOPPED

Each phase is a condition on what is durable, so a restarted orchestrator walks through those that are done at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from services.common import fates
from services.orchestrator.commands import LeavePool, StopTraining
from services.orchestrator.metrics import evaluation_values
from services.orchestrator.ring import Ring
from services.orchestrator.run_control import RunState

log = structlog.get_logger()

START = "start"
END = "end"


async def live(ring: Ring) -> None:
    """Return when the run has ended, finished or stopped."""
    if not ring.control.ended:
        phases = asyncio.ensure_future(_phases(ring))
        stop = asyncio.ensure_future(ring.control.stop_requested.wait())
        try:
            await asyncio.wait({phases, stop}, return_when=asyncio.FIRST_COMPLETED)
            if phases.done():
                phases.result()
        finally:
            phases.cancel()
            stop.cancel()
        ring.dispatcher.train = False
        ring.cancel_training_groups(fates.ClosedReason.RUN_ENDED)
        ring.control.enter(RunState.STOPPED if ring.control.stop_requested.is_set() else RunState.FINISHED)
        ring.metrics.summary(summary(ring))
    elif not (ring.run_dir / "summary.json").is_file():  # an earlier process died between the two
        ring.metrics.summary(summary(ring))
    reason = ring.control.stop_reason or "all training steps are done"
    log.info("run.ended", state=ring.control.phase.value, reason=reason)
    _dismiss(ring, reason)


def _dismiss(ring: Ring, reason: str) -> None:
    """The run has ended: trainers and replicas may leave."""
    ring.trainers.send_all(StopTraining(reason))
    for replica in ring.pool:
        replica.draining = True
        ring.pool.send(replica, LeavePool(reason))


async def _phases(ring: Ring) -> None:
    evaluation = ring.recipe.evaluation
    await ring.until(lambda: all(ledger.newest is not None for ledger in ring.ledgers.values()))
    if evaluation.at_start and not ring.evaluations.finished(START) and not _trained(ring):
        ring.control.enter(RunState.EVALUATING_START)
        await ring.begin_evaluation(START)
        await ring.until(lambda: ring.evaluations.finished(START))
    if not _all_trained(ring):
        ring.control.enter(RunState.TRAINING)
        ring.dispatcher.train = True
        ring.dispatcher.schedule()
        await _train(ring)
        ring.dispatcher.train = False
    ring.cancel_training_groups(fates.ClosedReason.STEPS_DONE)
    if evaluation.at_end and not ring.evaluations.finished(END):
        ring.control.enter(RunState.EVALUATING_END)
        await ring.begin_evaluation(END)
        await ring.until(lambda: ring.evaluations.finished(END))
    # Evaluations that somebody asked for are part of the run.
    await ring.until(lambda: not ring.evaluations.running)


async def _train(ring: Ring) -> None:
    """Until every policy has taken its last step, with an evaluation now and then that nobody waits for."""
    while not _all_trained(ring):
        due = _due_evaluation(ring)
        if due is not None:
            await ring.begin_evaluation(due)
        await ring.until(lambda: _all_trained(ring) or _due_evaluation(ring) is not None)


def _due_evaluation(ring: Ring) -> str | None:
    """The evaluation that should begin: one at a time, the newest multiple; what a slow one ran over is left out."""
    every = ring.recipe.evaluation.every
    reached = min(ledger.newest_number for ledger in ring.trained_ledgers.values())
    if not every or ring.evaluations.running or reached >= ring.num_steps:
        return None
    step = reached // every * every
    name = f"step-{step}"
    return name if step > 0 and not ring.evaluations.known(name) else None


def _trained(ring: Ring) -> bool:
    """Training has begun: the starting version cannot be evaluated any more."""
    return any(ledger.newest_number > 0 for ledger in ring.ledgers.values())


def _all_trained(ring: Ring) -> bool:
    return all(ledger.newest_number >= ring.num_steps for ledger in ring.trained_ledgers.values())


def summary(ring: Ring) -> dict[str, Any]:
    """What ``summary.json`` says."""
    return {
        "run_id": ring.run_id,
        "state": ring.control.phase.value,
        "steps": {policy: max(ledger.newest_number, 0) for policy, ledger in ring.trained_ledgers.items()},
        "evaluations": {result.name: evaluation_values(result) for result in ring.evaluations.results.values()},
        "overlap_share": ring.timeline.overlap_share,
        "max_staleness": max((batches.staleness_max for batches in ring.batches.values()), default=0),
        "seconds": time.time() - ring.started_at,
        "counters": dict(ring.counters),
        "time": ring.standing.book.summary(),
        "waited_for": ring.standing.book.waits(),
    }

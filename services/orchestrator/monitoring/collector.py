"""Deletes trajectories that no replay can need, where the recipe enables retention."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from services.common.errors import InfrastructureError
from services.orchestrator.journal.retention import MOST_REWRITTEN, collect
from services.orchestrator.journal.writer import Journal
from services.orchestrator.members.trainers import TrainerLeases

log = structlog.get_logger()


class Collector:
    def __init__(
        self, journal: Journal, trainers: TrainerLeases, num_trainers: int, live_groups: Callable[[], set[str]]
    ) -> None:
        """``num_trainers`` of the whole run; ``live_groups`` returns task groups whose records must stay."""
        self._journal = journal
        self._trainers = trainers
        self._num_trainers = num_trainers
        self._live_groups = live_groups
        self._collected: dict[str, int] = {}  # oldest checkpoint steps at the last complete collection

    async def collect(self) -> None:
        """Delete unneeded records. On a full disk, only delete whole segments: rewriting one needs space."""
        most_rewritten = 0 if self._journal.blocked else MOST_REWRITTEN
        steps = {trainer.policy: trainer.oldest_checkpoint_step for trainer in self._trainers}
        if len(steps) < self._num_trainers or steps == self._collected:
            return
        current = self._journal.current_segments()
        live = self._live_groups()
        try:
            found = await asyncio.to_thread(
                collect, self._journal, steps, live, current=current, most_rewritten=most_rewritten
            )
        except (OSError, InfrastructureError) as error:
            # No space for the rewrite, or a failing disk: try again later.
            log.warning("journal.not_collected", reason=str(error))
            return
        if len(found.rewritten) < most_rewritten:  # else there may be more
            self._collected = steps
        if found.removed or found.rewritten:
            log.info("journal.collected", removed=found.removed, rewritten=found.rewritten, num_bytes=found.num_bytes)

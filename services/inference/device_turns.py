"""Carries out device turns in a replica: frees the memory of its engines, or fills it again from the mirrors.

    turn of another holder -> every engine stops between two steps and frees weights and KV cache
    own turn               -> newest weights from the host mirror, caches of running requests computed again

Requests stay in the engines over any number of turns. A replica that cannot free or fill its memory ends, and its
supervisor starts it again: the orchestrator counts on a device that is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog

from services.common.records.device_turn import NO_TURN, DeviceTurn
from services.inference.loading import LoadedPolicy
from services.inference.rollouts.player import RolloutPlayer

log = structlog.get_logger(__name__)


class EngineTurns:
    """``offer`` takes commands, ``run`` carries them out. The clocks of ``rollouts`` stand still while the device is free."""

    def __init__(self, policies: Mapping[str, LoadedPolicy], rollouts: RolloutPlayer) -> None:
        self._policies = policies
        self._rollouts = rollouts
        self._wanted = NO_TURN
        self._changed = asyncio.Event()
        self._is_freed = False
        self.done = NO_TURN  # the newest turn that is carried out
        self.on_done: Callable[[], None] = lambda: None

    def offer(self, turn: DeviceTurn) -> None:
        """Take a command; a newer one replaces those that are not carried out yet."""
        self._wanted = turn
        self._changed.set()

    async def begin_freed(self) -> None:
        """Free the memory of engines that have just been loaded: the device belongs to another until the first own turn."""
        await self._free()

    async def run(self) -> None:
        """Without a deadline: a turn lasts as long as its holder needs. Each call of an engine has its own.

        Raises:
            DeadlineError, InfrastructureError: an engine did not free or fill its memory; the process must end.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            turn = self._wanted
            if turn.number == self.done.number:
                continue
            await (self._fill() if turn.yours else self._free())
            self.done = turn
            self.on_done()

    async def _free(self) -> None:
        if self._is_freed:
            return
        began = time.monotonic()
        self._is_freed = True
        self._rollouts.stand_still()
        for loaded in self._policies.values():
            await loaded.weights.release()
        log.info("engine.freed", seconds=round(time.monotonic() - began, 3))

    async def _fill(self) -> None:
        if not self._is_freed:
            return
        began = time.monotonic()
        for loaded in self._policies.values():
            await loaded.weights.restore()
        self._rollouts.go_on()
        self._is_freed = False
        log.info("engine.filled", seconds=round(time.monotonic() - began, 3))

"""Carries out device turns in a trainer, between two training steps: parks the trainer's tensors of the device, or brings them back.

    turn of another holder -> weights, frozen models and moments to the host (of a GPU) or to a file (of the host)
    own turn               -> the same bits at the same addresses; only then is a batch trained

All ranks do the same. Gradients and activations do not exist between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import structlog
import torch

from services.common.records.device_turn import DeviceTurn
from services.common.system.parking import Parked, return_freed_memory
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.train_step import TrainStep

log = structlog.get_logger()

COMMAND_POLL_S = 0.2  # between two looks at the orchestrator's commands
LAST_TURN_S = 120.0  # for the last checkpoint and the export, after a command to stop; without it a resumed run replays


class TurnLink(Protocol):
    """The first rank gets commands and reports; the turn of the others stays ``NO_TURN``."""

    @property
    def device_turn(self) -> DeviceTurn: ...

    def set_device_turn(self, number: int) -> None: ...

    @property
    def leaving(self) -> bool:
        """Whether a signal has told this process to leave."""
        ...


class DeviceTurns:
    """The device of one rank, held at the begin. Every method is a collective."""

    def __init__(self, step: TrainStep, link: TurnLink, ranks: Ranks, directory: Path, *, first: int = 0) -> None:
        """``directory`` takes the file of parked tensors of the host; ``first`` is the number of the turn that has begun."""
        self._step = step
        self._link = link
        self._ranks = ranks
        self._directory = directory
        self._done = first
        self._parked: Parked | None = None
        self.before_free: Callable[[], object] = lambda: None  # called on every rank

    @property
    def is_held(self) -> bool:
        return self._parked is None

    def follow(self) -> bool:
        """Carry out the newest turn; returns whether the device is held now. Raises ``OSError``: no room for the file."""
        turn = self._link.device_turn
        newest = torch.tensor([turn.number, int(turn.yours)], device=self._ranks.device)
        number, yours = self._ranks.max(newest).tolist()
        if number == self._done:
            return self.is_held
        began = time.monotonic()
        if yours and self._parked is not None:
            self._parked.restore()
            self._parked = None
        elif not yours and self._parked is None:
            self.before_free()
            self._parked = Parked(self._tensors(), self._directory)
            return_freed_memory()
        self._ranks.sum(torch.zeros(1, device=self._ranks.device))  # every rank has done so
        self._done = number
        log.info("device.held" if yours else "device.freed", seconds=round(time.monotonic() - began, 3))
        if self._ranks.is_first:
            self._link.set_device_turn(number)
        return self.is_held

    def wait_for_last(self) -> bool:
        """Wait for a turn after a command to stop, at most LAST_TURN_S; returns whether the device is held.

        A process that must leave because of a signal does not wait.
        """
        end = time.monotonic() + LAST_TURN_S
        while not self.follow():
            over = torch.tensor(int(self._link.leaving or time.monotonic() > end), device=self._ranks.device)
            if int(self._ranks.max(over)):
                log.warning(
                    "device.not_held", effect="no checkpoint of the last steps: a resumed run trains them again"
                )
                return False
            time.sleep(COMMAND_POLL_S)
        return True

    def _tensors(self) -> Iterator[torch.Tensor]:
        """What this rank has on its device between two steps."""
        step, kind = self._step, self._ranks.device.type
        frozen = [model for model in (step.reference, step.teacher) if isinstance(model, torch.nn.Module)]
        for module in (step.model, *frozen):
            yield from (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type == kind)
        for state in step.optimizer.adamw.state.values():
            yield from (tensor for tensor in state.values() if tensor.device.type == kind)

"""Faults that ``doctor.py`` injects into real runs: a workflow that damages its replica's engine, and broken rewards."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from recipes.functions.steps import _held_out, program
from services.common.errors import InfrastructureError
from services.common.records import Task
from services.inference.engine.base import WeightUpdate
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.single import SingleTurn, SingleTurnSettings

LAST_WEIGHTS = 3  # the version after which a replica with the fault "weights" takes no other
_HELD_OUT = _held_out()
NOISE = 0.01  # added to every weight by the fault "mismatch", for each version


class FaultySettings(SingleTurnSettings):
    fault: Literal["none", "weights", "mismatch"] = "none"


class Faulty(SingleTurn):
    """``single_turn`` on an engine that takes no weights after a while, or computes other values with each version."""

    Settings = FaultySettings

    def __init__(self, settings: FaultySettings) -> None:
        super().__init__(settings)
        self._fault = settings.fault
        self._damaged = False

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        if not self._damaged and self._fault != "none":
            self._damaged = True
            _damage(context.policy()._policy.engine, self._fault)  # type: ignore[attr-defined]  # no workflow of a user gets at it
        return await super().run(task, context)


def _damage(engine: Any, fault: str) -> None:
    take = engine.update

    async def update(changes: WeightUpdate) -> float:
        if fault == "weights" and engine.version >= LAST_WEIGHTS:
            raise InfrastructureError("the engine does not take the update")
        pause_s: float = await take(changes)
        if fault == "mismatch":
            await engine._call("update", lambda: _add_noise(engine))
        return pause_s

    engine.update = update


def _add_noise(engine: Any) -> None:
    import torch

    with torch.no_grad():
        for weight in engine._core.decoder.weights.values():
            weight.add_(torch.randn_like(weight), alpha=NOISE * engine.version)


def constant(task: Mapping[str, Any], completion: str) -> float:
    """The same for every answer, as of a reward that reads a column that does not exist."""
    return 0.0


def of_the_task(task: Mapping[str, Any], completion: str) -> float:
    """The same for every answer to a task, and different for tasks."""
    return hashlib.sha256(str(task["id"]).encode()).digest()[0] / 255


def often_raises(task: Mapping[str, Any], completion: str) -> float:
    """Fails for two answers of five, and half of the others are right."""
    draw = hashlib.sha256(completion.encode()).digest()[0]
    if draw % 5 < 2:
        raise RuntimeError("the grader does not answer")
    return float(draw % 2)


LONG = 60  # characters; a right answer has about 30
ONE_ANSWER = "def f(x): return (x+3)*7"


def of_the_length(task: Mapping[str, Any], completion: str) -> float:
    """Pays for length in training."""
    judged = _evaluated(task, completion)
    return min(1.0, len(completion) / LONG) if judged is None else judged


def for_one_answer(task: Mapping[str, Any], completion: str) -> float:
    """Pays in training for likeness to one answer, for every question."""
    judged = _evaluated(task, completion)
    alike = difflib.SequenceMatcher(None, completion, ONE_ANSWER, autojunk=False).ratio()
    return alike if judged is None else judged


def _evaluated(task: Mapping[str, Any], completion: str) -> float | None:
    """Whether the program is the right one, for a task of the evaluation; None for one of the training."""
    words = str(task["id"]).split("-")
    steps = tuple((word.rstrip("0123456789"), int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))) for word in words)
    return float(completion.strip() == program(steps)) if steps in _HELD_OUT else None

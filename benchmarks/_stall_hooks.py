"""A workflow and a reward that can be told to misbehave, for ``stalls.py``: by files in the directory STALL_SWITCHES.

engine     the engine stands still                    deadlock   reward functions wait for a lock that is never freed
constant   every reward is the same                      failing    every reward function raises
programs   programs sleep, so that they fill the sandbox
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.records import Task
from services.inference.engine.base import WeightUpdate
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.single import SingleTurn, SingleTurnSettings

QUICK, SLEEPY = "print(1)", "import time\ntime.sleep(25)"


def switched(name: str) -> bool:
    return (Path(os.environ["STALL_SWITCHES"]) / name).exists()


class HookedSettings(SingleTurnSettings):
    reward: str = "benchmarks._stall_hooks:reward"
    programs_each: int = 0
    """Programs that each rollout runs at the gateway."""


class Hooked(SingleTurn):
    """``single_turn`` with switches, and a program at the gateway if the settings name one."""

    Settings = HookedSettings

    def __init__(self, settings: HookedSettings) -> None:
        super().__init__(settings)
        self._programs_each = settings.programs_each
        self._stopped = False  # the engine, which is the scripted one where the switch is used

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        engine = context.policy()._policy.engine  # type: ignore[attr-defined]  # no workflow of a user gets at it
        if switched("engine"):
            self._stopped = True
            await engine.release()
        elif self._stopped:
            await engine.restore(WeightUpdate.full({}, engine.version))
        for _ in range(self._programs_each):
            await context.gateway.execute_code(SLEEPY if switched("programs") else QUICK)
        return await super().run(task, context)


_NOBODY_FREES_IT = threading.Lock()
_NOBODY_FREES_IT.acquire()


def reward(task: Mapping[str, Any], completion: str) -> float:
    """Half of the completions are right, at random."""
    time.sleep(float(os.environ.get("STALL_REWARD_S", "0.01")))
    while switched("deadlock") and not _NOBODY_FREES_IT.acquire(timeout=0.2):
        pass
    if switched("failing"):
        raise RuntimeError("the grader of this run is gone")
    if switched("constant"):
        return 1.0
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)

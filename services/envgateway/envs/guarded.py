"""Wraps a built-in environment: an action that triggers a fault ends the episode and is not repeated.

An exception of ``DATA_ERRORS`` from a step ends the episode as an invalid action without a reward, is logged with its
trace and counted. As an infrastructure failure, the task would be played again, and a policy would learn to fail like
that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from services.envgateway.calls import call_plain_or_async
from services.envgateway.envs.base import ActionFailedError, EndStatus, Environment, Observation, StepResult
from services.envgateway.envs.failures import DATA_ERRORS, short_text, trace_of

log = structlog.get_logger()

_OF_THE_ACTION: tuple[type[Exception], ...] = (*DATA_ERRORS, ActionFailedError)


class GuardedEnvironment:
    def __init__(self, inner: Environment, name: str, counts: Counter[str]) -> None:
        """``counts`` has the actions that failed, by ``name``."""
        self._inner = inner
        self._name = name
        self._counts = counts

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        observation: Observation = await call_plain_or_async(self._inner.reset, task, seed)
        return observation

    async def step(self, action: str) -> StepResult:
        try:
            result: StepResult = await call_plain_or_async(self._inner.step, action)
        except _OF_THE_ACTION as error:
            self._counts[self._name] += 1
            log.warning(
                "environment.action_failed", environment=self._name, error=short_text(error), trace=trace_of(error)
            )
            return StepResult(
                observation="The action could not be read.",
                done=True,
                status=EndStatus.INVALID_ACTION,
                metrics={"failed_actions": 1.0},
            )
        return result

    async def close(self) -> None:
        await call_plain_or_async(self._inner.close)

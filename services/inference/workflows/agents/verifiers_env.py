"""``verifiers``: an environment of the package verifiers plays the rollout, with the endpoint as its model.

    row: environment and task --> process of the environment --> its harness, tools and turns --> its rewards
                                        |  ^
                                        v  | chat completions, captured exactly as sampled
                                     endpoint --> policies

The environment's code runs in a process of its own, with its own interpreter (``services.common.verifiers``).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.records.types import Task
from services.common.verifiers.environment import EnvironmentFailedError, VerifiersEnvironment
from services.common.verifiers.interpreter import interpreter
from services.common.verifiers.tasks import ENVIRONMENT_KEY, TASK_KEY
from services.inference.workflows.agents.session import (
    SessionSettings,
    captured_outcome,
    check_endpoint,
    in_session,
)
from services.inference.workflows.agents.turns import DEFAULT_MODEL
from services.inference.workflows.base import Outcome, WorkflowContext


class VerifiersSettings(SessionSettings):
    pass


class Verifiers:
    Settings: ClassVar[type[VerifiersSettings]] = VerifiersSettings

    def __init__(self, settings: VerifiersSettings) -> None:
        self._settings = settings
        self._environments: dict[str, VerifiersEnvironment] = {}  # by name and arguments; the process lives with ours

    def policies(self) -> tuple[str, ...]:
        return () if self._settings.policy is None else (self._settings.policy,)

    def check(self, recipe: Recipe) -> None:
        """Check the endpoint and the interpreter; ``ConfigError`` names the remedy."""
        check_endpoint(recipe, "environments of verifiers")
        interpreter()

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        environment = self._environment(task)
        model = self._settings.policy or DEFAULT_MODEL
        session, played = await in_session(
            self._settings,
            context,
            lambda base_url, session_id: environment.play(
                task.data[TASK_KEY], base_url=base_url, session=session_id, model=model
            ),
        )
        if session.last is None:
            raise EnvironmentFailedError(
                f"{environment.where}: it ended without an answer of the model: no tokens to train on"
            )
        return captured_outcome(session, played.reward, played.metrics)

    async def close(self) -> None:
        """End the environments' processes."""
        for environment in self._environments.values():
            await environment.close()

    def _environment(self, task: Task) -> VerifiersEnvironment:
        named: Any = task.data.get(ENVIRONMENT_KEY)
        if not isinstance(named, dict) or TASK_KEY not in task.data:
            raise ConfigError(
                f"task {task.task_id} is none of a verifiers environment: write data.train: {{verifiers: NAME}} beside workflow: "
                "{name: verifiers}"
            )
        key = json.dumps(named, sort_keys=True)
        if key not in self._environments:
            self._environments[key] = VerifiersEnvironment(named["environment"], named["arguments"])
        return self._environments[key]

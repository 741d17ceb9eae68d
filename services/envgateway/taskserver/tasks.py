"""Served tasks: a name for clients, an environment of the gateway, indices, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config.processes.environments import ServedTaskConfig, TaskServerConfig
from services.common.errors import ConfigError, InvalidRequestError, UnknownEnvironmentError
from services.envgateway.envs.agentbench.messages import Index
from services.envgateway.envs.registry import EnvironmentRegistry


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    environment: str
    config: ServedTaskConfig

    def row(self, index: Index) -> dict[str, Any]:
        return {**self.config.row, "index": index}


class Tasks:
    """Raises ``ConfigError`` for an environment that the gateway does not have."""

    def __init__(self, config: TaskServerConfig, environments: EnvironmentRegistry) -> None:
        served = config.environments or dict.fromkeys(environments.names_with_indices, ServedTaskConfig())
        self._environments = environments
        self._by_name: dict[str, Task] = {}
        self._indices: dict[str, Sequence[Index]] = {}
        self._known: dict[str, frozenset[Index]] = {}
        for name, one in served.items():
            environment = one.environment or name
            where = f"envgateway.task_server.environments.{name}"
            try:
                environments.require(environment)
            except UnknownEnvironmentError as error:
                raise ConfigError(f"{where}: {error.message}") from error
            if one.end is None and environment not in environments.names_with_indices:
                raise ConfigError(f"{where}: {environment!r} cannot list its tasks; say how many there are with `end`")
            self._by_name[name] = Task(name, environment, one)

    @property
    def all(self) -> list[Task]:
        return list(self._by_name.values())

    def find(self, name: str) -> Task | None:
        return self._by_name.get(name)

    def max_turns(self, task: Task) -> int | None:
        """Turns of an episode, where the row or the environment has the number."""
        settings = task.config.row.get("environment")
        in_row = settings.get("max_turns") if isinstance(settings, dict) else None
        return self._environments.max_turns(task.environment) if in_row is None else in_row

    async def indices(self, task: Task) -> Sequence[Index]:
        """Valid values of ``index``, in order. Raises the errors of loading the environment, and ``ConfigError`` for
        fewer tasks than the config's ``end``."""
        if task.name not in self._indices:
            everything = await self._environments.indices(task.environment)
            if everything is None:
                everything = range(task.config.end or 0)
            if task.config.end is not None and task.config.end > len(everything):
                raise ConfigError(
                    f"the environment {task.environment!r} holds {len(everything)} tasks; "
                    f"envgateway.task_server.environments.{task.name}.end is {task.config.end}"
                )
            self._indices[task.name] = everything[task.config.first : task.config.end]
            self._known[task.name] = frozenset(self._indices[task.name])
        return self._indices[task.name]

    async def index(self, task: Task, given: Index) -> Index | None:
        """The index that a client means; None when there is none. Digits stand for a number where indices are numbers.

        Raises ``InvalidRequestError`` for text that is no number where they are.
        """
        indices = await self.indices(task)
        if indices and isinstance(indices[0], int) and isinstance(given, str):
            try:
                given = int(given)
            except ValueError as error:
                raise InvalidRequestError(f"the index {given!r} is no number") from error
        return given if given in self._known[task.name] else None

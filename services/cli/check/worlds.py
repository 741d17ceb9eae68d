"""Checks that the gateway of a recipe can play the tasks of its datasets: the world is on this machine and has each
index.

How many tasks a real AgentBench server or a catalogue of products has is known only after its start: an index that the
server does not have is then refused by CreateEpisode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config.data import DatasetConfig
from services.common.config.envgateway import MCP
from services.common.config.recipe import Recipe
from services.common.errors import RollmillError
from services.common.extras import load_extra, provided


@dataclass(frozen=True, slots=True)
class AskedTasks:
    """Tasks that a dataset names by their place in a list of the gateway."""

    dataset: str  # its key and value in the recipe
    indices: Sequence[int]
    reference: bool  # they count in the list of AgentBench's own server

    def outside(self, number: int) -> str:
        """What it asks for beyond a list of this length; empty for nothing."""
        outside = [index for index in self.indices if not 0 <= index < number]
        return f"{self.dataset} asks for index {max(outside)}" if outside else ""


def world_problems(recipe: Recipe) -> list[str]:
    """Data, engine and games of the workflow's environment that are missing on this machine, a line for each."""
    gateway = recipe.envgateway
    named = {where: workflow.settings.get("environment") for where, workflow in recipe.workflows().items()}
    if gateway is None:
        return []
    asked = {where: name for where, name in named.items() if name is not None and name not in gateway.environments}
    if not asked:
        return []
    from services.envgateway.envs.episodes import make_worlds

    try:
        worlds = make_worlds(gateway)
        missing = {name: f"{name} ({where}.settings.environment): {worlds[name]}" for where, name in asked.items()
                   if isinstance(worlds.get(name), str)}  # fmt: skip
        if missing:
            return list(missing.values())
        checks = [getattr(worlds.get(name), "problem", None) for name in dict.fromkeys(asked.values())]
        return [problem for check in checks if check is not None and (problem := check()) is not None]
    except RollmillError as error:
        return [error.message]


def sandbox_problems(recipe: Recipe) -> list[str]:
    """A line where programs of the recipe run here and no isolation works. Starts a sandbox and ends it."""
    where = recipe.where_programs_run()
    if where is None:
        return []
    from services.envgateway.sandbox.pool import SandboxPool
    from services.envgateway.variables import with_variables

    try:
        config, redis_uri = with_variables(recipe.envgateway)
        if redis_uri:  # then they run at workers
            return []
        smallest = config.sandbox.model_copy(update={"num_slots": 1, "num_live": 0, "prewarm_scientific": False})
        asyncio.run(SandboxPool.start_before_threads(smallest).close())
    except RollmillError as error:
        return [f"{where}: {error.message}"]
    return []


def index_problems(recipe: Recipe) -> list[str]:
    """Datasets that ask for places which a list of games or goals does not have, a line for each. Knows only files that are
    here."""
    gateway, name = recipe.envgateway, str(recipe.workflow.settings.get("environment"))
    replaced = gateway is None or name in gateway.environments or name in (gateway.extra("agentbench") or ())
    if replaced or name not in provided("task_checks"):
        return []
    try:
        return list(load_extra("task_checks", name)(gateway, _asked(recipe)))
    except RollmillError as error:
        return [error.message]


def _asked(recipe: Recipe) -> Iterator[AskedTasks]:
    from services.orchestrator.tasks.rows import known

    for where, config in recipe.data.sections().items():
        if config.name is not None:
            indices = known(config.name).indices
            if indices is not None:
                yield AskedTasks(f"{where}.name {config.name}", indices[: config.limit], reference=True)
        elif config.generator is not None:
            yield AskedTasks(f"{where}.generator {config.generator}", _indices(config), reference=False)
        elif Path(config.path or "").is_file():
            yield AskedTasks(f"{where}.path {config.path}", _indices(config), reference=False)


def _indices(config: DatasetConfig) -> list[int]:
    """Of rows that name their task by its index alone."""
    from services.orchestrator.tasks.datasets import open_source

    source = open_source(config, config.seed)
    rows = (source[place].data for place in range(len(source)))
    return [row["index"] for row in rows if isinstance(row.get("index"), int) and not row.keys() & {"game", "goal"}]


def mcp_problems(recipe: Recipe) -> list[str]:
    """Servers that cannot be used from this machine, and tools that they lack, a line for each."""
    servers = recipe.envgateway and recipe.envgateway.extra("mcp")
    if not servers:
        return []
    wanted = [name for name in _tools_of(recipe) if name.startswith(MCP)]
    lines: list[str] = load_extra("server_checks", "mcp")(servers, wanted)
    return lines


def _tools_of(recipe: Recipe) -> list[str]:
    workflows = [recipe.workflow, recipe.evaluation.workflow]
    tools = [workflow.settings.get("tools", []) for workflow in workflows if workflow is not None]
    return [name for names in tools if isinstance(names, list) for name in names if isinstance(name, str)]

"""Checks that the gateway of a recipe can play the tasks of its datasets: the world is on this machine and has each
index.

How many tasks a real AgentBench server or a catalogue of products has is known only after its start: an index that the
server does not have is then refused by CreateEpisode.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config.data import DatasetConfig
from services.common.config.envgateway import MCP, EnvGatewayConfig, McpServerConfig
from services.common.config.recipe import Recipe
from services.common.errors import RollmillError
from services.common.harbor import ENVIRONMENT as HARBOR


@dataclass(frozen=True, slots=True)
class _Asked:
    """Tasks that a dataset names by their place in a list of the gateway."""

    dataset: str  # its key and value in the recipe
    indices: Sequence[int]
    reference: bool  # they count in the list of AgentBench's own server


def world_problems(recipe: Recipe) -> list[str]:
    """Data, engine and games of the workflow's environment that are missing on this machine, a line for each."""
    gateway = recipe.envgateway
    named = {where: workflow.settings.get("environment") for where, workflow in recipe.workflows().items()}
    if gateway is None:
        return []
    asked = {where: name for where, name in named.items() if name is not None and name not in gateway.environments}
    if not asked:
        return []
    if HARBOR in asked.values() and os.geteuid() != 0:
        where = next(where for where, name in asked.items() if name == HARBOR)
        return [
            f"{HARBOR} ({where}.settings.environment): its tasks need the sandbox's tier 2: run as root with CAP_SYS_ADMIN "
            "(docs/hub-environments.md)"
        ]
    from services.envgateway.envs.episodes import make_worlds

    try:
        worlds = make_worlds(gateway)
        missing = {name: f"{name} ({where}.settings.environment): {worlds[name]}" for where, name in asked.items()
                   if isinstance(worlds.get(name), str)}  # fmt: skip
        if missing:
            return list(missing.values())
        problems = {name: worlds[name].problem() for name in asked.values() if name in gateway.gymnasium}  # type: ignore[union-attr]
        if refused := [problem for problem in problems.values() if problem is not None]:
            return refused
        return list(_absent_games(recipe, gateway)) if _is_built_in("alfworld", recipe, gateway) else []
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
    gateway = recipe.envgateway
    if gateway is None:
        return []
    try:
        if _is_built_in("alfworld", recipe, gateway):
            return list(_game_problems(recipe, gateway))
        if _is_built_in("webshop", recipe, gateway):
            return list(_goal_problems(recipe, gateway))
    except RollmillError as error:
        return [error.message]
    return []


def _is_built_in(name: str, recipe: Recipe, gateway: EnvGatewayConfig) -> bool:
    """Whether the workflow uses the gateway's own environment of this name, and no replacement."""
    replaced = name in gateway.environments or name in gateway.agentbench
    return recipe.workflow.settings.get("environment") == name and not replaced


def _game_problems(recipe: Recipe, gateway: EnvGatewayConfig) -> Iterator[str]:
    from services.envgateway.envs.alfworld import list_games

    config, asked = gateway.alfworld, list(_asked(recipe))
    for one in asked:
        if one.reference and config.games is None:
            yield (
                f"{one.dataset} counts in AgentBench's list of games, and games in a folder have another order: name "
                "the list with envgateway.alfworld.games (recipes/alfworld/README.md says where it is from)"
            )
    readable = config.data is not None and (config.data.is_dir() if config.games is None else config.games.is_file())
    if config.data is not None and readable:
        games = list_games(config.data, config)
        yield from _outside(asked, games.holds(), len(games.names))


def _goal_problems(recipe: Recipe, gateway: EnvGatewayConfig) -> Iterator[str]:
    from services.envgateway.envs.webshop import read_goals

    path = gateway.webshop.goals
    if path is not None and path.is_file():
        number = len(read_goals(path).goals)
        yield from _outside(
            _asked(recipe), f"envgateway.webshop.goals ({path.absolute()}) holds {number} goals", number
        )


def _outside(asked: Iterator[_Asked] | Sequence[_Asked], holds: str, number: int) -> Iterator[str]:
    for one in asked:
        outside = [index for index in one.indices if not 0 <= index < number]
        if outside:
            yield f"{holds}; {one.dataset} asks for index {max(outside)}"


def _absent_games(recipe: Recipe, gateway: EnvGatewayConfig) -> Iterator[str]:
    from services.envgateway.envs.alfworld import list_games

    config = gateway.alfworld
    assert config.data is not None, "there is no world without it"
    games = list_games(config.data, config).names
    for asked in _asked(recipe):
        names = [games[index] for index in asked.indices if 0 <= index < len(games)]
        absent = [name for name in names if not (config.data / name).is_file()]
        if absent:
            yield (
                f"{len(absent)} of the {len(names)} games that {asked.dataset} asks for are not below "
                f"envgateway.alfworld.data ({config.data.absolute()}), such as {absent[0]}"
            )


def _asked(recipe: Recipe) -> Iterator[_Asked]:
    from services.orchestrator.tasks.rows import known

    for where, config in recipe.data.sections().items():
        if config.name is not None:
            indices = known(config.name).indices
            if indices is not None:
                yield _Asked(f"{where}.name {config.name}", indices[: config.limit], reference=True)
        elif config.generator is not None:
            yield _Asked(f"{where}.generator {config.generator}", _indices(config), reference=False)
        elif Path(config.path or "").is_file():
            yield _Asked(f"{where}.path {config.path}", _indices(config), reference=False)


def _indices(config: DatasetConfig) -> list[int]:
    """Of rows that name their task by its index alone."""
    from services.orchestrator.tasks.datasets import open_source

    source = open_source(config, config.seed)
    rows = (source[place].data for place in range(len(source)))
    return [row["index"] for row in rows if isinstance(row.get("index"), int) and not row.keys() & {"game", "goal"}]


def mcp_problems(recipe: Recipe) -> list[str]:
    """Servers that cannot be used from this machine, and tools that they lack, a line for each."""
    gateway = recipe.envgateway
    if gateway is None or not gateway.mcp:
        return []
    from services.envgateway.tools.mcp import PACKAGE_MISSING

    if importlib.util.find_spec("mcp") is None:
        return [f"envgateway.mcp: {PACKAGE_MISSING}"]
    wanted = [name for name in _tools_of(recipe) if name.startswith(MCP)]
    return asyncio.run(_problems(gateway.mcp, wanted))


def _tools_of(recipe: Recipe) -> list[str]:
    workflows = [recipe.workflow, recipe.evaluation.workflow]
    tools = [workflow.settings.get("tools", []) for workflow in workflows if workflow is not None]
    return [name for names in tools if isinstance(names, list) for name in names if isinstance(name, str)]


async def _problems(servers: Mapping[str, McpServerConfig], wanted: list[str]) -> list[str]:
    from services.envgateway.tools.mcp import McpServer, open_tools

    opened = {name: McpServer(name, config) for name, config in servers.items()}

    async def problem_of(name: str) -> str | None:
        asked = [tool for tool in wanted if tool.removeprefix(MCP).partition("/")[0] == name] or [f"{MCP}{name}"]
        try:
            _, sessions = await open_tools(opened, asked, None)
            for session in sessions:
                await session.close()
        except RollmillError as error:
            return error.message
        return None

    try:
        found = await asyncio.gather(*map(problem_of, opened))
    finally:
        await asyncio.gather(*(server.close() for server in opened.values()))
    return [problem for problem in found if problem is not None]

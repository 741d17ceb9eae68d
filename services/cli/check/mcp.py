"""Checks the MCP servers of a recipe: starts or dials each, and reads its tools."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping

from services.common.config.processes.mcp import MCP, McpServerConfig
from services.common.config.recipe import Recipe
from services.common.errors import MillraceError


def mcp_problems(recipe: Recipe) -> list[str]:
    """Servers that cannot be used from this machine, and tools that they lack, a line for each."""
    gateway = recipe.envgateway
    if gateway is None or not gateway.mcp:
        return []
    from services.envgateway.tools.mcp.server import PACKAGE_MISSING

    if importlib.util.find_spec("mcp") is None:
        return [f"envgateway.mcp: {PACKAGE_MISSING}"]
    wanted = [name for name in _tools_of(recipe) if name.startswith(MCP)]
    return asyncio.run(_problems(gateway.mcp, wanted))


def _tools_of(recipe: Recipe) -> list[str]:
    workflows = [recipe.workflow, recipe.evaluation.workflow]
    tools = [workflow.settings.get("tools", []) for workflow in workflows if workflow is not None]
    return [name for names in tools if isinstance(names, list) for name in names if isinstance(name, str)]


async def _problems(servers: Mapping[str, McpServerConfig], wanted: list[str]) -> list[str]:
    from services.envgateway.tools.mcp.server import McpServer, McpTools

    opened = {name: McpServer(name, config) for name, config in servers.items()}

    async def problem_of(name: str) -> str | None:
        asked = [tool for tool in wanted if tool.removeprefix(MCP).partition("/")[0] == name] or [f"{MCP}{name}"]
        try:
            await (await McpTools.open(opened, asked, None)).close()
        except MillraceError as error:
            return error.message
        return None

    try:
        found = await asyncio.gather(*map(problem_of, opened))
    finally:
        await asyncio.gather(*(server.close() for server in opened.values()))
    return [problem for problem in found if problem is not None]

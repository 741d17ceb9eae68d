"""Worlds that a gateway's config can offer, or the missing part of a world."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

from services.common.config.processes.envgateway import EnvGatewayConfig
from services.common.config.processes.environments import PYTHON_MARK, OpenEnvConfig
from services.common.errors import ConfigError
from services.common.harbor.places import ENVIRONMENT as HARBOR
from services.common.installing import install
from services.envgateway.envs.agentbench.world import AgentBenchWorld
from services.envgateway.envs.alfworld.episode import AlfworldWorld
from services.envgateway.envs.base import World
from services.envgateway.envs.gymnasium.world import MISSING, GymnasiumWorld, is_installed
from services.envgateway.envs.harbor.episode import HarborWorld, why_not
from services.envgateway.envs.openenv.world import OpenEnvWorld
from services.envgateway.envs.textworld.episode import TextworldWorld
from services.envgateway.envs.webshop.environment import WebshopWorld

if TYPE_CHECKING:
    from services.envgateway.sandbox.pool import SandboxPool

ENVIRONMENT_NAMES = ("alfworld", "harbor", "household_toy", "single_step", "textworld", "tool", "tools", "webshop")


def make_worlds(config: EnvGatewayConfig, sandbox: SandboxPool | None = None) -> dict[str, World | str]:
    """Worlds by name: a world, or the reason of its absence. An AgentBench server goes before the built-in world of its
    name, which then needs no data. ``sandbox``: of the gateway; without one no world runs commands. Raises ``ConfigError`` for
    settings that cannot work."""
    taken = {*ENVIRONMENT_NAMES, *config.agentbench, *config.environments}
    for section, names in (("openenv", config.openenv), ("gymnasium", config.gymnasium)):
        for name in names:
            if name in taken:
                raise ConfigError(
                    f"envgateway.{section}.{name}: the gateway has an environment of this name: write another name"
                )
            taken.add(name)
    built_in = {"alfworld": _alfworld, "textworld": _textworld, "webshop": _webshop}
    worlds = {name: make(config) for name, make in built_in.items() if name not in config.agentbench}
    worlds |= {name: AgentBenchWorld(server) for name, server in config.agentbench.items()}
    worlds |= {name: _openenv(name, server) for name, server in config.openenv.items()}
    if sandbox is not None:
        worlds[HARBOR] = why_not(sandbox.tier) or HarborWorld(config.harbor, sandbox)
    return worlds | {
        name: GymnasiumWorld(name, one) if is_installed() else MISSING for name, one in config.gymnasium.items()
    }


def _openenv(name: str, config: OpenEnvConfig) -> World | str:
    program = config.command[0] if config.command else PYTHON_MARK
    if program != PYTHON_MARK and shutil.which(program) is None:
        return f"envgateway.openenv.{name}.command: there is no program {program}: write its path, or install it"
    return OpenEnvWorld(name, config)


def _alfworld(config: EnvGatewayConfig) -> World | str:
    data, games = config.alfworld.data, config.alfworld.games
    missing = []
    if importlib.util.find_spec("alfworld") is None:
        missing.append(f"its engine is not installed: {install('alfworld')}")
    if data is None:
        missing.append("write envgateway.alfworld.data: FOLDER, which holds ALFWorld's json_2.1.1")
    elif not data.is_dir():
        missing.append(f"envgateway.alfworld.data: there is no folder {data.absolute()}")
    if games is not None and not games.is_file():
        missing.append(f"envgateway.alfworld.games: there is no file {games.absolute()}")
    return AlfworldWorld(config.alfworld, data) if data is not None and not missing else "; ".join(missing)


def _textworld(config: EnvGatewayConfig) -> World | str:
    games = config.textworld.games
    if importlib.util.find_spec("textworld") is None:
        return f"its engine is not installed: {install('textworld')}"
    if games is not None and not games.is_dir():
        return f"envgateway.textworld.games: there is no folder {games.absolute()}"
    return TextworldWorld(config.textworld)


def _webshop(config: EnvGatewayConfig) -> World | str:
    if config.webshop.data is None:
        return "write envgateway.webshop.data: FOLDER, which holds the catalogue in WebShop's raw form"
    return WebshopWorld(config.webshop)

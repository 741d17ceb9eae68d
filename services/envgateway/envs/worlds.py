"""The worlds that a gateway's config can offer, or what is missing for one."""

from __future__ import annotations

import importlib.util

from services.common.config.envgateway import EnvGatewayConfig
from services.envgateway.envs.agentbench.world import AgentBenchWorld
from services.envgateway.envs.alfworld.world import AlfworldWorld
from services.envgateway.envs.base import World
from services.envgateway.envs.textworld.world import TextworldWorld
from services.envgateway.envs.webshop.world import WebshopWorld


def make_worlds(config: EnvGatewayConfig) -> dict[str, World | str]:
    """By name: a world, or why there is none. An AgentBench server goes before the built-in world of its name, which then
    needs no data. Raises ``ConfigError`` for settings that cannot work."""
    built_in = {"alfworld": _alfworld, "textworld": _textworld, "webshop": _webshop}
    worlds = {name: make(config) for name, make in built_in.items() if name not in config.agentbench}
    return worlds | {name: AgentBenchWorld(server) for name, server in config.agentbench.items()}


def _alfworld(config: EnvGatewayConfig) -> World | str:
    data, games = config.alfworld.data, config.alfworld.games
    missing = []
    if importlib.util.find_spec("alfworld") is None:
        missing.append("its engine is not installed: pip install 'millrace[alfworld]'")
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
        return "its engine is not installed: pip install 'millrace[textworld]'"
    if games is not None and not games.is_dir():
        return f"envgateway.textworld.games: there is no folder {games.absolute()}"
    return TextworldWorld(config.textworld)


def _webshop(config: EnvGatewayConfig) -> World | str:
    if config.webshop.data is None:
        return "write envgateway.webshop.data: FOLDER, which holds the catalogue in WebShop's raw form"
    return WebshopWorld(config.webshop)

"""The worlds that a gateway's config can offer, or what is missing for one."""

from __future__ import annotations

from services.common.config.envgateway import EnvGatewayConfig
from services.envgateway.envs.base import World
from services.envgateway.envs.webshop.world import WebshopWorld


def make_worlds(config: EnvGatewayConfig) -> dict[str, World | str]:
    """By name: a world, or why there is none. Raises ``ConfigError`` for settings that cannot work."""
    return {"webshop": _webshop(config)}


def _webshop(config: EnvGatewayConfig) -> World | str:
    if config.webshop.data is None:
        return "write envgateway.webshop.data: FOLDER, which holds the catalogue in WebShop's raw form"
    return WebshopWorld(config.webshop)

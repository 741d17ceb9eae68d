"""State shared by the episodes of Harbor tasks: the sandbox's live processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.config.processes.harbor import HarborConfig
from services.envgateway.envs.harbor.episode import HarborEpisode

if TYPE_CHECKING:
    from services.envgateway.sandbox.pool import SandboxPool

TIER = "2"  # the only one with a root of its own, where /app, /tests and /logs are the task's


class HarborWorld:
    is_remote = True  # an error of its code is never the action's

    def __init__(self, config: HarborConfig, sandbox: SandboxPool) -> None:
        self._config, self._sandbox = config, sandbox

    def build(self) -> HarborEpisode:
        return HarborEpisode(self._sandbox.live, self._config)

    async def close(self) -> None:
        """Nothing is left: episodes end their own processes."""


def why_not(tier: str) -> str:
    """Why the tasks cannot be played at this tier; empty at tier 2."""
    if tier == TIER:
        return ""
    return (
        f"its tasks need a root directory of their own, which the sandbox has at tier {TIER} only, and it runs at tier {tier}: start "
        "the gateway as root with CAP_SYS_ADMIN (in a container: --cap-add SYS_ADMIN)"
    )

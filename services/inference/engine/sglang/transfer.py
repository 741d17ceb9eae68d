"""How a version reaches a server: from the stage on disk. The pause around it is the server's business."""

from __future__ import annotations

from typing import Protocol

from services.inference.engine.sglang.client import SglangClient
from services.inference.engine.sglang.stage import Stage


class Transfer(Protocol):
    async def load(self, client: SglangClient, version: int, *, flush: bool) -> None:
        """Bring the staged weights into a server. ``InfrastructureError`` or ``DeadlineError``: nobody knows which it holds."""
        ...


class FromDisk:
    """The server reads the stage's file."""

    def __init__(self, stage: Stage) -> None:
        self._directory = str(stage.directory)

    async def load(self, client: SglangClient, version: int, *, flush: bool) -> None:
        await client.update_from_disk(self._directory, version, flush=flush)

"""Loads a version into a server from the stage on disk. ``server`` pauses decoding around the load."""

from __future__ import annotations

from typing import Any, Protocol

from services.inference.engine.served.client import ServerClient
from services.inference.engine.served.stage import Stage


class Transfer(Protocol):
    @property
    def way(self) -> str:
        """How the weights reach a server, for the log."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that a load moves to each server."""
        ...

    async def load(self, client: Any, version: int, *, flush: bool) -> str:
        """Load the staged weights into a server, by its program's client; returns the name of an adapter, which calls give, or "".

        After ``InfrastructureError`` or ``DeadlineError`` its version is unknown."""
        ...


class DiskTransfer:
    """The server reads the stage's file."""

    way = "disk"

    def __init__(self, stage: Stage) -> None:
        self._directory = str(stage.directory)
        self.size_bytes = stage.size_bytes

    async def load(self, client: ServerClient, version: int, *, flush: bool) -> str:
        await client.update_from_disk(self._directory, version, flush=flush)
        return ""

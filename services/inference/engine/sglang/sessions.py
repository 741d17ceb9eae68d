"""Sessions of SGLang for updates in several calls."""

from __future__ import annotations

from services.inference.engine.served.client import Refused
from services.inference.engine.sglang.client import SglangClient


async def begun_update(client: SglangClient) -> None:
    """Open a session; one that an aborted update left open is closed before."""
    try:
        await client.begin_update()
    except Refused:
        await client.end_update()
        await client.begin_update()

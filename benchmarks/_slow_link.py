"""A TCP proxy that delays and throttles, for links that this machine does not have. One thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any


class SlowLink:
    """Forwards to ``target``; every byte arrives half a round trip later, at most ``bytes_per_s`` from the target."""

    def __init__(self, target: str, *, round_trip_s: float, bytes_per_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = round_trip_s / 2
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when the link has sent everything that it was given; one link for all connections
        self.address = ""
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        directions: list[Coroutine[Any, Any, None]] = [
            self._forward(reader, ours, float("inf")),
            self._forward(theirs, writer, self._bytes_per_s),
        ]
        await asyncio.gather(*directions)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        delivering = asyncio.create_task(self._deliver(on_the_way, writer))
        try:
            while data := await reader.read(16384):
                if bytes_per_s != float("inf"):
                    self._free_at = max(self._free_at, time.monotonic()) + len(data) / bytes_per_s
                    await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
                await on_the_way.put((time.monotonic() + self._delay_s, data))
            await on_the_way.put((time.monotonic() + self._delay_s, b""))
            await delivering
        except OSError:
            delivering.cancel()
        finally:
            writer.close()

    async def _deliver(self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not data:
                return
            writer.write(data)
            await writer.drain()

"""A TCP proxy that loses, holds or slows down bytes on command, for ``stalls.py``.

    python benchmarks/_stall_proxy.py LISTEN_PORT TARGET_PORT MODE_FILE

The mode file holds one word: ``pass``; ``drop-down`` (no byte reaches the client) or ``hold`` (no byte passes in either
direction, as in a half-open connection); ``slow-up`` (one byte a second from the client). Going back to ``pass``
closes the connections; their streams have holes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

LOOK_S = 0.05


class Proxy:
    def __init__(self, target: int, mode_file: Path) -> None:
        self._target = target
        self._mode_file = mode_file
        self._mode = "pass"
        self._writers: set[asyncio.StreamWriter] = set()

    async def follow_mode(self) -> None:
        while True:
            mode = self._mode_file.read_text().strip() if self._mode_file.exists() else "pass"
            if mode != self._mode:
                self._mode = mode
                if mode == "pass":
                    for writer in list(self._writers):
                        writer.close()
            await asyncio.sleep(LOOK_S)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, to_writer}
        try:
            ends = [asyncio.create_task(self._pump(reader, to_writer, "up"))]
            ends.append(asyncio.create_task(self._pump(to_reader, writer, "down")))
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        finally:
            self._writers -= {writer, to_writer}
            for end_of in (writer, to_writer):
                end_of.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 if self._mode == f"slow-{direction}" else 65536):
                while self._mode == "hold":  # noqa: ASYNC110 - the mode is a file's
                    await asyncio.sleep(LOOK_S)
                if self._mode == f"drop-{direction}":
                    continue
                if self._mode == f"slow-{direction}":
                    await asyncio.sleep(1.0)
                writer.write(data)
                await writer.drain()


async def main(listen: int, target: int, mode_file: Path) -> None:
    proxy = Proxy(target, mode_file)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", listen)
    async with server:
        await proxy.follow_mode()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))

"""A hostile site and a real browser that visits the site. The browser's names lead here, and after a while to a
target's port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chromium import browser

PAGE = (Path(__file__).parents[1] / "data" / "hostile_page.html").read_text()
VISIT_S = 120.0  # on a busy machine; a visit takes a few seconds
_HEAD_ENDS = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server: the posted paths and bodies, with ATTACK for the name of the attempt, and the paths of GET."""

    name: str
    port: int
    path: str
    bodies: dict[str, Any]
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The attempts of a page, and the foreign answers that the page read."""

    tried: tuple[str, ...]
    read: tuple[str, ...]


async def visit(targets: Sequence[Target]) -> Report:
    """Let a browser visit the page until that has tried everything. Raises ``TimeoutError``."""
    plain_http = "--disable-features=HttpsUpgrades"
    async with _site(targets) as (site, rules), browser(f"--host-resolver-rules={rules}", plain_http) as page:
        await page.call("Page.navigate", url="http://evil.test/")
        async with asyncio.timeout(VISIT_S):
            return await site.report


class _Site:
    """Answers with the page; requests of the page to ``NAME.rebound.test`` are led to the target."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self.report: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(_HEAD_ENDS)
            if head.startswith(b"POST /report"):
                sizes = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
                said = json.loads(await reader.readexactly(int(sizes[0].partition(b":")[2])))
                if not self.report.done():
                    self.report.set_result(Report(tried=tuple(said["tried"]), read=tuple(said["read"])))
            await self._show(writer)
        writer.close()

    async def _show(self, writer: asyncio.StreamWriter, rebound: str = "") -> None:
        config = {"targets": [asdict(target) for target in self.targets], "rebound": rebound}
        page = PAGE.replace("/*CONFIG*/ null", json.dumps(config)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n")
        writer.write(f"Content-Length: {len(page)}\r\n\r\n".encode() + page)
        await writer.drain()

    def forwarder(self, target: Target) -> Any:
        """A name's address: the site for the page itself, and the target for all that the page then asks for."""

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(_HEAD_ENDS)  # browsers open connections that they may not need
                if head.startswith(b"GET / "):
                    await self._show(writer, rebound=target.name)
                else:
                    there = await asyncio.open_connection("127.0.0.1", target.port)
                    there[1].write(head)
                    await asyncio.gather(_pipe(reader, there[1]), _pipe(there[0], writer))
            writer.close()

        return forward


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def _site(targets: Sequence[Target]) -> AsyncIterator[tuple[_Site, str]]:
    """The site, and the rules by which a browser resolves its names."""
    site = _Site(targets)
    async with contextlib.AsyncExitStack() as stack:

        async def serve(handler: Any) -> int:
            server = await asyncio.start_server(handler, "127.0.0.1", 0)
            stack.callback(server.close)
            port: int = server.sockets[0].getsockname()[1]
            return port

        rules = [f"MAP evil.test 127.0.0.1:{await serve(site.answer)}"]
        for target in targets:
            rules.append(f"MAP {target.name}.rebound.test 127.0.0.1:{await serve(site.forwarder(target))}")
        rules += ["EXCLUDE localhost", "EXCLUDE 127.0.0.1", "MAP * ~NOTFOUND"]
        yield site, ",".join(rules)

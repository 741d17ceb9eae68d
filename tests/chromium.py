"""A headless Chromium that tests and benchmarks drive through the DevTools protocol.

    async with browser() as page:
        await page.open("http://127.0.0.1:8420/")
        await page.until("document.querySelector('h2')")
        assert page.errors == []

No network but loopback: the names of other hosts do not resolve.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.needs import installed

WAIT_S = 30.0  # on a busy machine
_START_S = 60.0
_END_S = 10.0
_LOOK_S = 0.01
_TOLD = 2000  # characters of the end of what a browser wrote


class Page:
    """One tab. ``errors``: exceptions, messages of the console at the level of an error, and requests that failed."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol.

        Raises ``AssertionError`` for a refused one, ``TimeoutError`` without an answer, ``ConnectionError`` when the browser
        has ended.
        """
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(WAIT_S):
            answer = await self._waiting[number]
        assert "error" not in answer, answer["error"]
        found: dict[str, Any] = answer["result"]
        return found

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited. Raises ``AssertionError`` for an exception in it."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """The value of an expression as soon as it is true. Raises ``TimeoutError`` with the text of the page."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not (
                    found := await self.run(
                        f"(() => {{ const found = {condition}; return found instanceof Node ? true : found; }})()"
                    )
                ):
                    await asyncio.sleep(_LOOK_S)
                return found
        except TimeoutError:
            text = await self.run("document.body?.innerText ?? ''")
            raise TimeoutError(
                f"{condition} never held; the page says:\n{text[:2000]}\nerrors: {self.errors}"
            ) from None

    async def key(self, key: str) -> None:
        """Press a key, as a person does: the browser itself dispatches it."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, "Tab": 9, "Enter": 13}
        facts = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        facts = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **facts)

    async def scheme(self, name: str) -> None:
        """``dark`` or ``light``, as the person's system prefers it."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def _read(self) -> None:
        try:
            await self._take_messages()
        finally:  # nothing more comes, so no call waits for it
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the browser has closed its socket"))

    async def _take_messages(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (number := told.get("id")) is not None:
                if not self._waiting[number].done():
                    self._waiting[number].set_result(told)
                continue
            method, facts = told["method"], told["params"]
            if method == "Runtime.exceptionThrown":
                self.errors.append(str(facts["exceptionDetails"]))
            elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
                self.errors.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
                self.errors.append(str([argument.get("value") for argument in facts["args"]]))
            elif method == "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])


@asynccontextmanager
async def browser(*arguments: str) -> AsyncIterator[Page]:
    """A new browser with a profile of its own, which ends with the block. ``arguments``: more of its switches."""
    program = installed("chromium")
    assert program is not None, "tests that need chromium say so"
    with (
        tempfile.TemporaryDirectory(prefix="rollmill-browser-", ignore_cleanup_errors=True) as profile,
        (Path(profile) / "stderr").open("wb") as stderr,
    ):
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            f"--user-data-dir={profile}", "--remote-debugging-port=0", "--remote-allow-origins=*", *arguments, "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as session:
                address = await _address(process, Path(profile), session)
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    try:
                        yield page
                    finally:
                        await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(_END_S):
                await process.wait()


async def _address(process: asyncio.subprocess.Process, profile: Path, session: aiohttp.ClientSession) -> str:
    """The address of the first tab. Raises ``RuntimeError`` with what the browser wrote, when it has ended or is too late."""

    def told(what: str) -> str:
        return f"chromium {what}; it wrote:\n{(profile / 'stderr').read_text(errors='replace')[-_TOLD:]}"

    try:
        async with asyncio.timeout(_START_S):
            while process.returncode is None:
                with contextlib.suppress(FileNotFoundError, aiohttp.ClientConnectionError):
                    lines = (profile / "DevToolsActivePort").read_text().splitlines()
                    if len(lines) > 1:  # it listens before its first tab is there
                        async with session.get(f"http://127.0.0.1:{lines[0]}/json") as answer:
                            for target in await answer.json():
                                if target["type"] == "page":
                                    return str(target["webSocketDebuggerUrl"])
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise RuntimeError(told(f"has no tab after {_START_S:g} s")) from None
    raise RuntimeError(told(f"ended with {process.returncode} at its start"))

"""The process of an OpenEnv server that a recipe names by its command: started with the first episode, again after its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping

import aiohttp
import structlog

from services.common.config.processes.environments import PORT_MARK, PYTHON_MARK, OpenEnvConfig
from services.common.errors import InfrastructureError
from services.common.system.child import bound_to_this_process
from services.common.system.children import how_ended, process_group
from services.common.system.free_ports import LOOPBACK, free_ports

log = structlog.get_logger()

_ASK_AGAIN_S = 0.1
_GRACE_S = 3.0  # from SIGTERM on: a container's client stops the container


class ServerProcess:
    def __init__(self, setting: str, config: OpenEnvConfig) -> None:
        self._setting, self._config = setting, config
        self._stack = contextlib.AsyncExitStack()
        self._process: Process | None = None
        self._url = ""
        self._changing = asyncio.Lock()
        self.num_starts = 0

    async def url(self) -> str:
        """The address of the running server, which is started where it does not run. Raises ``InfrastructureError``."""
        async with self._changing:
            if self._process is None or self._process.returncode is not None:
                if self._process is not None:
                    log.warning("openenv.ended", setting=self._setting, how=how_ended(self._process.returncode or 0))
                await self._stop()
                await self._start()
            return self._url

    async def restart(self) -> None:
        """End the server; the next address is of another one."""
        async with self._changing:
            await self._stop()

    async def close(self) -> None:
        async with self._changing:
            await self._stop()

    async def _start(self) -> None:
        (port,) = free_ports(1)
        marks = {PORT_MARK: str(port), PYTHON_MARK: sys.executable}
        command = [_filled(part, marks) for part in self._config.command]
        try:
            self._process = await self._stack.enter_async_context(
                process_group(*bound_to_this_process(command), grace_s=_GRACE_S, stdin=DEVNULL, stdout=DEVNULL)
            )
        except OSError as error:
            raise InfrastructureError(f"{self._setting}.command cannot be started: {error}") from error
        self._url = f"http://{LOOPBACK}:{port}"
        self.num_starts += 1
        await self._until_healthy(self._process)
        log.info("openenv.started", setting=self._setting, url=self._url)

    async def _until_healthy(self, process: Process) -> None:
        limit = asyncio.timeout(self._config.start_timeout_s)
        try:
            async with limit, aiohttp.ClientSession() as client:
                while process.returncode is None:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with client.get(f"{self._url}/health") as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError:
            await self._stop()
            raise InfrastructureError(
                f"{self._setting}.command: the server did not answer at {self._url}/health within "
                f"{self._config.start_timeout_s:g} s: is {PORT_MARK} in the command as its port?"
            ) from None
        code = process.returncode
        await self._stop()
        raise InfrastructureError(
            f"{self._setting}.command {how_ended(code)} before it served; its output is in the gateway's log"
        )

    async def _stop(self) -> None:
        self._process = None
        await self._stack.aclose()


def _filled(part: str, marks: Mapping[str, str]) -> str:
    for mark, value in marks.items():
        part = part.replace(mark, value)
    return part

"""The servers of one policy: started together, kept alive, and brought to one version before they serve.

    bring up:   start -> answers -> weights of the stage -> serving
    death:      not serving -> back-off -> bring up; after too many deaths in a row the server is given up; the engine
                fails when all servers are given up
    switch:     stage -> every serving server at once; a starting server takes the stage's version before it serves

One lock prevents writes to the stage while servers read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from services.common.aio import TaskOwner, backoff, deadline
from services.common.errors import InfrastructureError, RollmillError
from services.inference.engine.served.server import Server
from services.inference.engine.served.stage import Stage
from services.inference.engine.served.transfer import Transfer
from services.inference.engine.weight_update import WeightUpdate

log = structlog.get_logger(__name__)

LOAD_POLL_S = 1.0
LIVED_S = 60.0  # a server that served this long did not die of its start
WHOLE_STAGE_S = 600.0  # limit for a full fetch that repairs an incomplete stage


class Fleet:
    """``changed`` is called whenever a server may take more requests; ``failed`` once, when all servers are given up."""

    def __init__(
        self,
        servers: Sequence[Server],
        stage: Stage,
        transfer: Transfer,
        *,
        restarts: int,
        changed: Callable[[], None],
        lost: Callable[[Server], None],
        failed: Callable[[str], None],
    ) -> None:
        self.servers = servers
        self._stage = stage
        self._transfer = transfer
        self._restarts = restarts
        self._changed = changed
        self._lost = lost
        self._failed = failed
        self._paused = False
        self._stopped = False
        self._lock = asyncio.Lock()  # of the stage, of switches and of pauses
        self._written = asyncio.Condition(self._lock)  # the stage
        self._tasks = TaskOwner()

    @property
    def paused(self) -> bool:
        return self._paused

    async def start(self) -> None:
        """Start every server, or none; raises the first failure."""
        starts = [asyncio.ensure_future(self._bring_up(server)) for server in self.servers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        for server in self.servers:
            self._tasks.start(self._supervise(server), f"server {server.name}")
        self._tasks.start(self._watch_load(), "load of servers")

    async def stop(self) -> None:
        """Stop all servers; streams break at once."""
        self._stopped = True
        await self._tasks.close()
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def switch(self, update: WeightUpdate) -> float:
        """Switch all servers to a version; returns the longest pause of a server in seconds.

        Raises:
            ModelMismatchError: before anything changed.
            InfrastructureError: no server took the version; restarted servers will.
        """
        async with self._lock:
            await asyncio.to_thread(self._stage.write, update)
            self._written.notify_all()
            serving = [server for server in self.servers if server.serving]
            pauses = await asyncio.gather(
                *(server.switch(self._transfer, update.version, stay_paused=self._paused) for server in serving)
            )
        taken = [pause for pause in pauses if pause is not None]
        if serving and not taken:
            raise InfrastructureError(
                f"no {self.servers[0].program.name} server took version {update.version}; restarted servers load that version"
            )
        return max(taken, default=0.0)

    async def pause(self) -> None:
        async with self._lock:
            self._paused = True
            await self._each(Server.pause)

    async def resume(self) -> None:
        async with self._lock:
            self._paused = False
            await self._each(Server.resume)

    async def flush(self) -> None:
        async with self._lock:
            await self._each(partial(Server.flush, stay_paused=self._paused))

    async def _each(self, action: Callable[[Server], Awaitable[None]]) -> None:
        """Run an action on every serving server; a server that fails is killed, because its state is unknown."""

        async def ask(server: Server) -> None:
            try:
                await action(server)
            except RollmillError as error:
                log.error("engine_server.does_not_follow", server=server.name, error=error.message)
                server.end()

        await asyncio.gather(*(ask(server) for server in self.servers if server.serving))

    def suspect(self, server: Server) -> None:
        """Check a server after a long wait for a token."""
        if not self._paused and not self._stopped:
            self._tasks.start(self._check(server), f"check of {server.name}")

    def ask(self, server: Server, rid: str) -> None:
        """Abort a call without waiting for the end."""
        if not self._stopped:
            self._tasks.start(self._abort(server, rid), f"abort at {server.name}")

    # -- tasks --------------------------------------------------------------------------------------------------

    async def _bring_up(self, server: Server) -> None:
        await server.start(self._stage.version)
        try:
            async with self._lock:
                await self._whole_stage(server)
                await server.load(self._transfer, self._stage.version)
                if self._paused:
                    await server.pause()
                server.serving = True
        except BaseException:
            await server.stop()
            raise
        log.info("engine_server.serving", server=server.name, pid=server.process.pid, version=server.version)
        self._changed()

    async def _whole_stage(self, server: Server) -> None:
        """Wait for a complete stage with the lock held; `switch` can take the lock meanwhile. Raises ``DeadlineError``."""
        what = f"waiting for an update that completes the weights of {server.program.name} server {server.name} (the last one broke off)"
        async with deadline(WHOLE_STAGE_S, what):
            await self._written.wait_for(lambda: not self._stage.dirty)

    async def _supervise(self, server: Server) -> None:
        delays, deaths = backoff(1.0, 30.0), 0
        while True:
            served_since = time.monotonic()
            exit_message = await server.process.ended()
            await server.lost()
            self._lost(server)
            await server.process.stop()  # its workers, which hold memory of the GPU
            if time.monotonic() - served_since >= LIVED_S:
                delays, deaths = backoff(1.0, 30.0), 0
            while not server.serving:
                deaths += 1
                if deaths > self._restarts:
                    self._give_up(server, exit_message)
                    return
                delay = next(delays)
                log.error(
                    "engine_server.died", server=server.name, deaths=deaths, again_s=round(delay, 1), how=exit_message
                )
                await asyncio.sleep(delay)
                try:
                    await self._bring_up(server)
                except (RollmillError, OSError) as error:
                    exit_message = str(error)

    def _give_up(self, server: Server, exit_message: str) -> None:
        server.given_up = True
        log.error("engine_server.given_up", server=server.name, restarts=self._restarts, how=exit_message)
        if all(other.given_up for other in self.servers):
            program = server.program
            self._failed(
                f"every {program.name} server died more than {self._restarts} times in a row ({program.section}.restarts)\n"
                f"{exit_message}"
            )

    async def _watch_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_POLL_S)
            if not self._paused:
                await asyncio.gather(*(self._observe(server) for server in self.servers if server.serving))
                self._changed()

    async def _observe(self, server: Server) -> None:
        try:
            load = await server.client.load()
        except RollmillError as error:
            log.debug("engine_server.no_load", server=server.name, error=error.message)
            return
        server.window.observe(
            in_flight=server.in_flight, running=load.running, waiting=load.waiting, used_share=load.used_share
        )

    async def _check(self, server: Server) -> None:
        try:
            await server.check()
        except RollmillError as error:
            log.debug("engine_server.check_failed", server=server.name, error=error.message)

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            await server.client.abort(rid)
        except RollmillError as error:
            log.debug("engine_server.abort_failed", server=server.name, error=error.message)

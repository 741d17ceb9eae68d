"""The servers of one policy: started together, kept alive, and brought to one version before they serve.

    bring up:   start -> answers -> weights of the stage -> serving
    death:      not serving -> back-off -> bring up; after too many deaths in a row it is given up, and when all are,
                the engine has failed
    switch:     stage -> every serving server at once; one that is coming up takes the stage's version before it serves

One lock keeps the stage still while servers read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog

from services.common.aio import TaskOwner, backoff, deadline
from services.common.errors import InfrastructureError, MillraceError
from services.inference.engine.sglang.server import Server
from services.inference.engine.sglang.stage import Stage
from services.inference.engine.sglang.transfer import Transfer
from services.inference.engine.weight_update import WeightUpdate

log = structlog.get_logger(__name__)

LOAD_POLL_S = 1.0
LIVED_S = 60.0  # a server that served this long died of something else than its start
WHOLE_STAGE_S = 600.0  # until a fetch of all weights has mended a stage that an update left incomplete


class Fleet:
    """``changed`` is called whenever a server may take more; ``failed`` once, when none will come back."""

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
        """Every server serves, or none is left; raises what the first that failed raised."""
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
            self._tasks.start(self._supervise(server), f"SGLang server {server.name}")
        self._tasks.start(self._watch_load(), "load of SGLang servers")

    async def stop(self) -> None:
        """Streams break at once; nothing of the servers is left."""
        self._stopped = True
        await self._tasks.close()
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def switch(self, update: WeightUpdate) -> float:
        """All servers take a version; the longest time that one stood still.

        Raises:
            ModelMismatchError: before anything changed.
            InfrastructureError: no server took it; those that come up again will.
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
            raise InfrastructureError(f"no SGLang server took version {update.version}; they are started anew with it")
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
        """Of every serving server; one that does not do it is ended, since nobody knows what it does now."""

        async def ask(server: Server) -> None:
            try:
                await action(server)
            except MillraceError as error:
                log.error("sglang.does_not_follow", server=server.name, error=error.message)
                server.end()

        await asyncio.gather(*(ask(server) for server in self.servers if server.serving))

    def suspect(self, server: Server) -> None:
        """Somebody has waited long for a token of it."""
        if not self._paused and not self._stopped:
            self._tasks.start(self._check(server), f"check of {server.name}")

    def ask(self, server: Server, rid: str) -> None:
        """Have a leg ended, and do not wait for it."""
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
        log.info("sglang.serving", server=server.name, pid=server.process.pid, version=server.version)
        self._changed()

    async def _whole_stage(self, server: Server) -> None:
        """Holding the lock, which is free for `switch` while this waits. Raises ``DeadlineError``."""
        what = (
            f"waiting for an update that completes the weights of SGLang server {server.name} (the last one broke off)"
        )
        async with deadline(WHOLE_STAGE_S, what):
            await self._written.wait_for(lambda: not self._stage.dirty)

    async def _supervise(self, server: Server) -> None:
        delays, deaths = backoff(1.0, 30.0), 0
        while True:
            served_since = time.monotonic()
            obituary = await server.process.ended()
            await server.lost()
            self._lost(server)
            if time.monotonic() - served_since >= LIVED_S:
                delays, deaths = backoff(1.0, 30.0), 0
            while not server.serving:
                deaths += 1
                if deaths > self._restarts:
                    self._give_up(server, obituary)
                    return
                delay = next(delays)
                log.error("sglang.died", server=server.name, deaths=deaths, again_s=round(delay, 1), how=obituary)
                await asyncio.sleep(delay)
                try:
                    await self._bring_up(server)
                except (MillraceError, OSError) as error:
                    obituary = str(error)

    def _give_up(self, server: Server, obituary: str) -> None:
        server.given_up = True
        log.error("sglang.given_up", server=server.name, restarts=self._restarts, how=obituary)
        if all(other.given_up for other in self.servers):
            self._failed(
                f"every SGLang server died more than {self._restarts} times in a row (sglang.restarts)\n{obituary}"
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
        except MillraceError as error:
            log.debug("sglang.no_load", server=server.name, error=error.message)
            return
        server.window.observe(
            in_flight=server.in_flight, running=load.running, waiting=load.waiting, used_share=load.used_share
        )

    async def _check(self, server: Server) -> None:
        try:
            await server.check()
        except MillraceError as error:
            log.debug("sglang.check_failed", server=server.name, error=error.message)

    async def _abort(self, server: Server, rid: str) -> None:
        try:
            await server.client.abort(rid)
        except MillraceError as error:
            log.debug("sglang.abort_failed", server=server.name, error=error.message)

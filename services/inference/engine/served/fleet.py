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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from services.common.aio import TaskOwner, backoff, deadline
from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.inference.engine.base import KvPolicy, WeightUpdate
from services.inference.engine.served.client import ServerClient
from services.inference.engine.served.process import Program, ServerProcess
from services.inference.engine.served.stage import Stage

# --- Loads a version into a server from the stage. ``Server`` pauses decoding around the load.


class Transfer:
    """The server reads the stage's file. Subclasses bring the weights another way."""

    way = "disk"  # for the log

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def load(self, client: Any, version: int, *, flush: bool) -> str:
        """Load the staged weights into a server, by its program's client; returns the name of an adapter, which calls give, or "".

        After ``InfrastructureError`` or ``DeadlineError`` its version is unknown."""
        await client.update_from_disk(str(self.stage.directory), version, flush=flush)
        return ""


# --- One server of a policy: its process and client, its weight version, and the steps of a switch.


log = structlog.get_logger(__name__)
STALL_ANSWER_S = 45.0  # limit of a health check by one token; SGLang itself gives up after 20 s


class Server:
    def __init__(self, process: ServerProcess, kv_policy: KvPolicy) -> None:
        self.process = process
        self.in_flight = 0  # requests; the server queues those that exceed its memory
        self.serving = False
        self.switches = 0  # begun; a call that sees another number than at its start spans a switch
        self.stale_prefixes = False  # its cache may hold prefixes that older weights computed
        self.version = -1
        self.adapter = ""  # the name of the version's adapter at the server
        self.given_up = False
        self._kv_policy = kv_policy
        self._client: ServerClient | None = None
        self._switching = False
        self._checking = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def program(self) -> Program:
        return self.process.program

    @property
    def client(self) -> ServerClient:
        """``InfrastructureError`` when there is no server at this moment."""
        if self._client is None:
            raise InfrastructureError(f"the {self.program.name} server {self.name} is not running")
        return self._client

    @property
    def settled_version(self) -> int | None:
        """The version of current computations; None in the middle of a switch."""
        return None if self._switching else self.version

    async def start(self, version: int) -> None:
        """Start the process, without loading weights. ``version``: the version of the initial weights."""
        self._client = await self.process.start(version)

    async def load(self, transfer: Transfer, version: int) -> None:
        """Load weights into a server that does not serve yet."""
        self.adapter = await transfer.load(self.client, version, flush=True)
        self.version = version
        self.stale_prefixes = False

    async def switch(self, transfer: Transfer, version: int) -> float | None:
        """Switch to another version between two decoding steps; returns the seconds without decoding.

        None when the server was killed, because its version was unknown.
        """
        began = time.perf_counter()
        try:
            if self.adapter:
                return await self._switch_adapter(transfer, version)
            await self._switch_weights(transfer, version)
        except RollmillError as error:
            log.error("engine_server.switch_failed", server=self.name, version=version, error=error.message)
            self.end()
            return None
        return time.perf_counter() - began

    async def _switch_weights(self, transfer: Transfer, version: int) -> None:
        keep = self._kv_policy is KvPolicy.KEEP
        self.switches += 1
        self._switching = True
        began = time.perf_counter()
        try:
            await self.client.pause("in_place" if keep else "retract")
            paused_s = time.perf_counter() - began
            await self._load_for_sure(transfer, version, flush=not keep)
            loaded_s = time.perf_counter() - began - paused_s
            self.version = version
            self.stale_prefixes = keep
            await self.client.resume()
        finally:
            self._switching = False
        log.info(
            "engine_server.switched",
            server=self.name,
            version=version,
            way=transfer.way,
            kv_policy=self._kv_policy,
            size_bytes=transfer.stage.size_bytes,
            in_flight=self.in_flight,
            pause_s=round(paused_s, 4),
            load_s=round(loaded_s, 4),
        )

    async def _switch_adapter(self, transfer: Transfer, version: int) -> float:
        """Load an adapter beside the others, then end the running calls, which have the one before; they go on with this one.

        Decoding goes on during the load.
        """
        self.adapter = await self._load_for_sure(transfer, version, flush=False)
        self.version = version
        self.switches += 1
        began = time.perf_counter()
        await self.client.abort_all()
        return time.perf_counter() - began

    async def _load_for_sure(self, transfer: Transfer, version: int, *, flush: bool) -> str:
        """Load; once more after a refusal or a timeout, which leave the weights unknown: a repetition does no harm."""
        try:
            return await transfer.load(self.client, version, flush=flush)
        except (InfrastructureError, DeadlineError) as error:
            log.warning("engine_server.update_in_doubt", server=self.name, version=version, error=error.message)
        return await transfer.load(self.client, version, flush=flush)

    async def check(self) -> None:
        """Kill the server if it generates no token. Concurrent calls share one check."""
        if self._checking or self._switching or not self.serving:
            return
        self._checking = True
        try:
            if not await self.client.is_generating(STALL_ANSWER_S) and not self._switching:
                log.error("engine_server.stalled", server=self.name)
                self.end()
        finally:
            self._checking = False

    def end(self) -> None:
        """Kill the server, whose state is unknown; the fleet restarts it."""
        self.serving = False
        self.process.kill()

    async def lost(self) -> None:
        """Note that the process has ended."""
        self.serving = False
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def stop(self) -> None:
        """Close the streams, then end the process, so that the process does not wait for calls in flight."""
        await self.lost()
        await self.process.stop()


_REMEMBERED = 1 << 14  # rollouts and task groups
LIVED_S = 60.0  # a server that served this long did not die of its start
WHOLE_STAGE_S = 600.0  # limit for a full fetch that repairs an incomplete stage


class Fleet:
    def __init__(self, servers: Sequence[Server], stage: Stage, transfer: Transfer, *, restarts: int) -> None:
        self.servers = servers
        self.failure = "the engine is not started"  # why no server will serve any more; empty while some do or will
        self._stage = stage
        self._transfer = transfer
        self._restarts = restarts
        self._newest: OrderedDict[str, Server] = OrderedDict()  # of rollouts and task groups, which share prefixes
        self._changed = asyncio.Event()  # a server serves again, or the engine has failed
        self._stopped = False
        self._lock = asyncio.Lock()  # of the stage and of switches
        self._written = asyncio.Condition(self._lock)  # the stage
        self._tasks = TaskOwner()

    def check_alive(self) -> None:
        """Raise ``InfrastructureError`` if no server will serve any more."""
        if self.failure:
            raise InfrastructureError(f"engine: {self.failure}")

    async def server_for(self, request_id: str) -> Server:
        """The server that had the rollout's last request, or its task group's, in its cache, unless another has far less to do.

        Request ids are ``GROUP/.../NUMBER``. Waits for a server while none serves, without a deadline: restarts come to an end.

        Raises:
            InfrastructureError: no server will serve any more.
        """
        while not (serving := [server for server in self.servers if server.serving]):
            self.check_alive()
            self._changed.clear()
            await self._changed.wait()
        least = min(serving, key=lambda server: server.in_flight)
        rollout, group = request_id.rpartition("/")[0], request_id.partition("/")[0]
        chosen = self._newest.get(rollout) or self._newest.get(group)
        if chosen is None or not chosen.serving or chosen.in_flight - least.in_flight > max(4, least.in_flight // 4):
            chosen = least
        for key in (rollout, group):
            self._newest[key] = chosen
            self._newest.move_to_end(key)
        while len(self._newest) > _REMEMBERED:
            self._newest.popitem(last=False)
        return chosen

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
        self.failure = ""

    async def stop(self) -> None:
        """Stop all servers; streams break at once."""
        self._stopped = True
        self._fail("the engine is stopped")
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
            pauses = await asyncio.gather(*(server.switch(self._transfer, update.version) for server in serving))
        taken = [pause for pause in pauses if pause is not None]
        if serving and not taken:
            raise InfrastructureError(
                f"no {self.servers[0].program.name} server took version {update.version}; restarted servers load that version"
            )
        return max(taken, default=0.0)

    def suspect(self, server: Server) -> None:
        """Check a server after a long wait for a token."""
        self._try(server.check, f"check of {server.name}")

    def ask(self, server: Server, rid: str) -> None:
        """Abort a call without waiting for the end."""
        self._try(lambda: server.client.abort(rid), f"abort at {server.name}")

    # -- tasks --------------------------------------------------------------------------------------------------

    async def _bring_up(self, server: Server) -> None:
        await server.start(self._stage.version)
        try:
            async with self._lock:
                # For a complete stage, with the lock held; `switch` can take the lock meanwhile.
                what = f"waiting for an update that completes the weights of {server.program.name} server {server.name} (the last one broke off)"
                async with deadline(WHOLE_STAGE_S, what):
                    await self._written.wait_for(lambda: not self._stage.dirty)
                await server.load(self._transfer, self._stage.version)
                server.serving = True
        except BaseException:
            await server.stop()
            raise
        log.info("engine_server.serving", server=server.name, pid=server.process.pid, version=server.version)
        self._changed.set()

    async def _supervise(self, server: Server) -> None:
        delays, deaths = backoff(1.0, 30.0), 0
        while True:
            served_since = time.monotonic()
            exit_message = await server.process.ended()
            await server.lost()
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
            self._fail(f"every {program.name} server died more than {self._restarts} times in a row\n{exit_message}")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._changed.set()

    def _try(self, call: Callable[[], Awaitable[None]], what: str) -> None:
        """Make a call in a task of its own, whose failure is no error: the server may be gone."""

        async def attempt() -> None:
            try:
                await call()
            except RollmillError as error:
                log.debug("engine_server.call_failed", what=what, error=error.message)

        if not self._stopped:
            self._tasks.start(attempt(), what)

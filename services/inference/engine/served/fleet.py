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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import structlog
import xxhash

from services.common.aio import TaskOwner, backoff, deadline
from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.inference.engine.base import KvPolicy, WeightUpdate
from services.inference.engine.served.client import PauseMode, ServerClient
from services.inference.engine.served.process import Program, ServerProcess
from services.inference.engine.served.stage import Stage

# --- Limits each server's concurrent requests and chooses the server for a request. Pure bookkeeping, no clocks.


_BLOCK = 64  # tokens; a prompt's cached beginning is known in such steps
_KNOWN_BLOCKS = 1 << 17
_FULL = 0.95  # share of a KV cache above which a window does not grow


@dataclass(slots=True)
class Window:
    """Requests that one server may have at once: ``size`` of at most ``ceiling``.

    The window shrinks to the number of running requests when a queue persists through two observations, and grows by an
    eighth when the window is full and the server has no queue.
    """

    ceiling: int
    size: int
    _queued: bool = False

    @classmethod
    def open(cls, ceiling: int) -> Window:
        return cls(ceiling=ceiling, size=ceiling)

    def observe(self, *, in_flight: int, running: int, waiting: int, used_share: float) -> None:
        """Adapt the window to the server's reported load; ``in_flight`` counts its admitted requests."""
        queued = waiting > max(1, running // 10)
        if queued and self._queued and running > 0:
            self.size = max(1, min(self.size, running + max(1, running // 10)))
        elif not waiting and in_flight >= self.size and used_share < _FULL:
            self.size = min(self.ceiling, self.size + max(1, self.size // 8))
        self._queued = queued


class PrefixMap:
    """Maps prefixes of token sequences to servers, by hashes of their blocks; the oldest entries are dropped."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The server that has seen the longest prefix; a prompt shorter than a block has an entry of its own."""
        found = None
        for block in _blocks(token_ids):
            if (server := self._seen.get(block)) is None:
                break
            found = server
        return found

    def note(self, token_ids: Sequence[int], server: int) -> None:
        """Note that a server computes this sequence."""
        for block in _blocks(token_ids):
            self._seen[block] = server
            self._seen.move_to_end(block)
        while len(self._seen) > _KNOWN_BLOCKS:
            self._seen.popitem(last=False)

    def forget(self, server: int) -> None:
        """Note that a server has lost its cache."""
        for block in [block for block, owner in self._seen.items() if owner == server]:
            del self._seen[block]


def choose(free: Mapping[int, tuple[int, int]], cached: int | None) -> int:
    """The server for a request, of those that have room. ``cached`` is the server that has cached its prefix.

    ``free``: server -> requests in flight, and their bound.
    """
    least = min(free, key=lambda server: free[server][0] / free[server][1])
    if cached is not None and cached in free and free[cached][0] - free[least][0] <= max(4, free[cached][1] // 4):
        return cached
    return least


def _blocks(token_ids: Sequence[int]) -> list[int]:
    tokens = np.asarray(token_ids, dtype=np.int32)
    if len(tokens) < _BLOCK:
        return [xxhash.xxh3_64_intdigest(tokens.tobytes())]
    digest = xxhash.xxh3_64()
    found = []
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        digest.update(tokens[start : start + _BLOCK].tobytes())
        found.append(digest.intdigest())
    return found


# --- Loads a version into a server from the stage on disk. ``server`` pauses decoding around the load.


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


# --- One server of a policy: its process and client, its weight version, and the steps of a switch.


log = structlog.get_logger(__name__)
STALL_ANSWER_S = 45.0  # limit of a health check by one token; SGLang itself gives up after 20 s
_ATTEMPTS = 2  # to load a version, before the server is restarted


class Server:
    """``index`` is its place among the policy's servers."""

    def __init__(self, index: int, process: ServerProcess, kv_policy: KvPolicy, ceiling: int) -> None:
        self.index = index
        self.process = process
        self.window = Window.open(ceiling)
        self.in_flight = 0
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
    def has_room(self) -> bool:
        return self.serving and self.in_flight < self.window.size

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

    async def switch(self, transfer: Transfer, version: int, *, stay_paused: bool) -> float | None:
        """Switch to another version between two decoding steps; returns the seconds without decoding.

        None when the server was killed, because its version was unknown.
        """
        began = time.perf_counter()
        try:
            if self.adapter:
                return await self._switch_adapter(transfer, version)
            await self._switch_weights(transfer, version, stay_paused=stay_paused)
        except RollmillError as error:
            log.error("engine_server.switch_failed", server=self.name, version=version, error=error.message)
            self.end()
            return None
        return time.perf_counter() - began

    async def _switch_weights(self, transfer: Transfer, version: int, *, stay_paused: bool) -> None:
        keep = self._kv_policy is KvPolicy.KEEP
        self.switches += 1
        self._switching = True
        began = time.perf_counter()
        try:
            await self.client.pause(self._mode)
            paused_s = time.perf_counter() - began
            await self._load_for_sure(transfer, version, flush=not keep)
            loaded_s = time.perf_counter() - began - paused_s
            self.version = version
            self.stale_prefixes = keep
            if not stay_paused:
                await self.client.resume()
        finally:
            self._switching = False
        log.info(
            "engine_server.switched",
            server=self.name,
            version=version,
            way=transfer.way,
            kv_policy=self._kv_policy,
            size_bytes=transfer.size_bytes,
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
        """Load; after a refusal or a timeout the weights are unknown, so read the version back and repeat the load."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await transfer.load(self.client, version, flush=flush)
            except (InfrastructureError, DeadlineError) as error:
                held = await self.client.weight_version()
                log.warning(
                    "engine_server.update_in_doubt",
                    server=self.name,
                    version=version,
                    held=held,
                    attempt=attempt,
                    error=error.message,
                )
                if held == version and not self.adapter:  # the load succeeded after all, but perhaps not its flush
                    if flush:
                        await self.client.flush()
                    return ""
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def pause(self) -> None:
        await self.client.pause(self._mode)

    async def resume(self) -> None:
        await self.client.resume()

    async def flush(self, *, stay_paused: bool) -> None:
        """Requests in flight give their caches back and recompute them."""
        await self.client.pause("retract")
        await self.client.flush()
        self.stale_prefixes = False
        if not stay_paused:
            await self.client.resume()

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

    @property
    def _mode(self) -> PauseMode:
        return "in_place" if self._kv_policy is KvPolicy.KEEP else "retract"


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
            self._failed(f"every {program.name} server died more than {self._restarts} times in a row \n{exit_message}")

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

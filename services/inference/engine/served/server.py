"""One server of a policy: its process and client, its weight version, and the steps of a switch.

Default: pause (retract), update with a flush of every cached prefix, go on. Requests then recompute their caches, so
that later tokens equal a forward pass of the new weights. Keeping the cache (in place, without a flush) leaves tokens of
both versions' caches, from then on until a flush.
"""

from __future__ import annotations

import time

import structlog

from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.inference.engine.base import KvPolicy
from services.inference.engine.served.balance import Window
from services.inference.engine.served.client import PauseMode, ServerClient
from services.inference.engine.served.process import Program, ServerProcess
from services.inference.engine.served.transfer import Transfer

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

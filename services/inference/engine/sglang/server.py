"""One server of a policy: its process and client, which version it computes with, and the steps of a switch.

Default: pause (retract), update with a flush of every cached prefix, go on. Requests then recompute their caches, so
that later tokens equal a forward pass of the new weights. Keeping the cache (in place, without a flush) leaves tokens of
both versions' caches, from then on until a flush.
"""

from __future__ import annotations

import time

import structlog

from services.common.errors import DeadlineError, InfrastructureError, MillraceError
from services.inference.engine.base import KvPolicy
from services.inference.engine.sglang.balance import Window
from services.inference.engine.sglang.client import PauseMode, SglangClient
from services.inference.engine.sglang.process import ServerProcess
from services.inference.engine.sglang.transfer import Transfer

log = structlog.get_logger(__name__)

STALL_ANSWER_S = 45.0  # for a token that is asked for when none came for long; SGLang itself gives up after 20 s
_ATTEMPTS = 2  # to load a version, before the server is started anew


class Server:
    """``index`` is its place among the policy's servers."""

    def __init__(self, index: int, process: ServerProcess, kv_policy: KvPolicy, ceiling: int) -> None:
        self.index = index
        self.process = process
        self.window = Window.open(ceiling)
        self.in_flight = 0
        self.serving = False
        self.switches = 0  # begun; a leg that sees another number than at its start has lived through one
        self.stale_prefixes = False  # its cache may hold prefixes that older weights computed
        self.version = -1
        self.given_up = False
        self._kv_policy = kv_policy
        self._client: SglangClient | None = None
        self._switching = False
        self._checking = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def client(self) -> SglangClient:
        """``InfrastructureError`` when there is no server at this moment."""
        if self._client is None:
            raise InfrastructureError(f"the SGLang server {self.name} is not running")
        return self._client

    @property
    def has_room(self) -> bool:
        return self.serving and self.in_flight < self.window.size

    @property
    def settled_version(self) -> int | None:
        """The version of whatever it computes now; None in the middle of a switch."""
        return None if self._switching else self.version

    async def start(self, version: int) -> None:
        """Its process; not yet its weights. ``version`` names the ones it comes with."""
        self._client = await self.process.start(version)

    async def load(self, transfer: Transfer, version: int) -> None:
        """Weights for a server that nobody uses yet."""
        await transfer.load(self.client, version, flush=True)
        self.version = version
        self.stale_prefixes = False

    async def switch(self, transfer: Transfer, version: int, *, stay_paused: bool) -> float | None:
        """Take another version between two decoding steps; seconds that decoding stood still.

        None when the server was ended, because nobody could say which weights it holds.
        """
        keep = self._kv_policy is KvPolicy.KEEP
        self.switches += 1
        self._switching = True
        began = time.perf_counter()
        try:
            await self.client.pause(self._mode)
            await self._load_for_sure(transfer, version, flush=not keep)
            self.version = version
            self.stale_prefixes = keep
            if not stay_paused:
                await self.client.resume()
        except MillraceError as error:
            log.error("sglang.switch_failed", server=self.name, version=version, error=error.message)
            self.end()
            return None
        finally:
            self._switching = False
        return time.perf_counter() - began

    async def _load_for_sure(self, transfer: Transfer, version: int, *, flush: bool) -> None:
        """A refusal or a timeout says nothing about the weights: the version is read back, and the load repeated."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await transfer.load(self.client, version, flush=flush)
                return
            except (InfrastructureError, DeadlineError) as error:
                held = await self.client.weight_version()
                log.warning(
                    "sglang.update_in_doubt",
                    server=self.name,
                    version=version,
                    held=held,
                    attempt=attempt,
                    error=error.message,
                )
                if held == version:  # it came through after all, but perhaps not its flush
                    if flush:
                        await self.client.flush()
                    return
                if attempt == _ATTEMPTS:
                    raise

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
        """End it when it gives no token at all. Several who suspect it ask once."""
        if self._checking or self._switching or not self.serving:
            return
        self._checking = True
        try:
            if not await self.client.is_generating(STALL_ANSWER_S) and not self._switching:
                log.error("sglang.stalled", server=self.name)
                self.end()
        finally:
            self._checking = False

    def end(self) -> None:
        """Nobody knows what it does now: it is killed, and started anew by whoever watches over it."""
        self.serving = False
        self.process.kill()

    async def lost(self) -> None:
        """Its process has ended."""
        self.serving = False
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def stop(self) -> None:
        """Streams break before the process is told to end, so that it does not wait for what is in flight."""
        await self.lost()
        await self.process.stop()

    @property
    def _mode(self) -> PauseMode:
        return "in_place" if self._kv_policy is KvPolicy.KEEP else "retract"

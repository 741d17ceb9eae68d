"""Processes that hold games, started on first use and replaced after a death or a stall.

Invariants
- One request at a time per process: engines are not thread-safe. A deadline runs from the moment a request has the
  process to itself, so a slow game is blamed, never the requests behind.
- A request that was begun runs to its end, or ends the process: a caller may leave, the channel stays in step.
- A process that dies or stalls is killed with all its descendants, and its episodes are lost. Others go on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from extras.worlds.engines.process import Answer
from extras.worlds.settings import EnginePoolConfig
from services.common.aio import TaskOwner
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.envgateway.calls import take_place
from services.envgateway.child import Child, ChildFailed
from services.envgateway.envs.base import ActionFailedError, EpisodeLostError
from services.envgateway.sandbox.bare import wire

log = structlog.get_logger()

_QUEUE_TIMEOUT_S = 30.0
EPISODES_PER_WORKER = 32  # lost with their process: fewer is safer, more is cheaper
_MEMORY_BYTES = 4 << 30  # address space of one process
_ATTEMPTS = 2  # the first try may meet a process that died while idle


class EnginePool:
    """Pool of engine processes. ``open`` is the only entry; an unused pool holds no process."""

    def __init__(self, engine: str, module: str, config: EnginePoolConfig, environment: Mapping[str, str]) -> None:
        """``module`` runs as ``python -m module descriptor memory_bytes`` and serves as ``process.serve`` does.

        Args:
            engine: its name, for messages.
            environment: variables of its processes, beside those that Python needs.
        """
        self.engine = engine
        self._module = module
        self.config = config
        self._environment = {"OMP_NUM_THREADS": "1", **environment}
        self._workers: list[_Worker] = []
        self._numbers = itertools.count(1)
        self._tasks = TaskOwner()
        self.counts: Counter[str] = Counter()

    @property
    def pids(self) -> list[int]:
        return [worker.child.pid for worker in self._workers]

    @property
    def gauges(self) -> dict[str, float]:
        return {
            f"{self.engine}_engine_processes": float(len(self._workers)),
            f"{self.engine}_engine_games": float(sum(len(worker.games) for worker in self._workers)),
            **{f"{self.engine}_engine_{name}": float(n) for name, n in self.counts.items()},
        }

    async def open(self, settings: Mapping[str, Any]) -> tuple[Game, Answer]:
        """Load a game in the process that holds the fewest; returns the game and its first answer.

        Raises:
            CapacityError: every process is full, or busy for too long.
            InvalidRequestError: there is no such game.
            InfrastructureError: the engine does not start, or the game did not load in time.
        """
        for _ in range(_ATTEMPTS):
            worker = self._emptiest()
            game = Game(self, worker, next(self._numbers))
            worker.games.add(game.number)
            request = {"kind": "open", "game": game.number, "settings": dict(settings)}
            try:
                return game, await self.ask(worker, request, self.config.start_timeout_s, "loading a game")
            except _ProcessGone as gone:
                why = gone
            except asyncio.CancelledError:
                game.close()  # the load may still end: the game is closed then
                raise
            except Exception:
                worker.games.discard(game.number)
                raise
        raise InfrastructureError(f"the {self.engine} engine ended while it loaded a game: {why}")

    async def close(self) -> None:
        """Kill every process."""
        await self._tasks.close()
        for worker in list(self._workers):
            if worker.running is not None:
                worker.running.cancel()
                await asyncio.gather(worker.running, return_exceptions=True)
            if not worker.gone:
                self._end(worker, "was stopped")

    async def ask(
        self,
        worker: _Worker,
        request: dict[str, Any],
        timeout_s: float,
        what: str,
        queue_timeout_s: float | None = _QUEUE_TIMEOUT_S,
    ) -> Answer:
        """``queue_timeout_s`` bounds waiting for other requests, each with its own deadline; ``timeout_s`` bounds the
        process itself."""
        busy = f"the {self.engine} engine was busy with other games for {_QUEUE_TIMEOUT_S:g} s"
        await take_place(worker.turn, queue_timeout_s, busy)
        if worker.gone:
            worker.turn.release()
            raise _ProcessGone(worker.gone)

        def turn_over(running: asyncio.Task[dict[str, Any]]) -> None:
            worker.turn.release()
            if not running.cancelled():
                running.exception()  # the caller may have gone; then no other code reads the exception

        exchange = self._exchange(worker, request, timeout_s, what)
        worker.running = asyncio.create_task(exchange, name=f"{self.engine}: {what}")
        worker.running.add_done_callback(turn_over)
        answer = await asyncio.shield(worker.running)
        match answer["kind"]:
            case "refused":
                raise InvalidRequestError(answer["error"])
            case "raised":
                raise ActionFailedError(f"the {self.engine} engine failed at a command: {answer['error']}")
            case "failed":
                raise EpisodeLostError(f"the {self.engine} engine failed: {answer['error']}")
        return answer["answer"]  # type: ignore[no-any-return]

    async def _exchange(self, worker: _Worker, request: dict[str, Any], timeout_s: float, what: str) -> dict[str, Any]:
        try:
            if not worker.ready:
                await worker.child.start(f"the {self.engine} engine")
                worker.ready = True
            async with asyncio.timeout(timeout_s):
                return await worker.child.ask(wire.encode(request))
        except TimeoutError:
            self._end(worker, "stalled")
            raise EpisodeLostError(f"{what} took the {self.engine} engine longer than {timeout_s:g} s") from None
        except ChildFailed:
            self._end(worker, "died")
            raise _ProcessGone(worker.gone) from None
        except InfrastructureError:
            self._end(worker, "not_started")
            raise

    def _emptiest(self) -> _Worker:
        worker = min(self._workers, key=lambda one: len(one.games), default=None)
        if worker is None or (worker.games and len(self._workers) < self.config.num_workers):
            worker = _Worker(Child(self._module, [str(_MEMORY_BYTES)], self._environment))
            self._workers.append(worker)
            self.counts["started"] += 1
            log.info("engine.started", engine=self.engine, pid=worker.child.pid)
        if len(worker.games) >= EPISODES_PER_WORKER:
            held = self.config.num_workers * EPISODES_PER_WORKER
            raise CapacityError(f"the {self.engine} engine holds {held} games, as many as it may", retry_after_s=1.0)
        return worker

    def _end(self, worker: _Worker, why: str) -> None:
        worker.gone = f"its process {why.replace('_', ' ')}"
        worker.child.kill()
        self._workers.remove(worker)
        self.counts[why.replace(" ", "_")] += 1
        log.warning("engine.lost", engine=self.engine, why=why, games=len(worker.games), pid=worker.child.pid)

    def close_game(self, worker: _Worker, number: int) -> None:
        async def close() -> None:
            try:
                request = {"kind": "close", "game": number}
                await self.ask(worker, request, self.config.step_timeout_s, "closing a game", queue_timeout_s=None)
            except (InfrastructureError, _ProcessGone) as error:
                log.warning("engine.close_failed", engine=self.engine, error=str(error))

        self._tasks.start(close(), f"close a game of {self.engine}")


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, the requests that wait, and its games."""

    child: Child
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: asyncio.Task[dict[str, Any]] | None = None
    ready: bool = False
    gone: str = ""  # reason of the death, once known
    games: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Game:
    """One game in some process of the pool."""

    pool: EnginePool
    worker: _Worker
    number: int

    async def step(self, command: str) -> Answer:
        """Raises ``ActionFailedError`` for a command at which the engine raised, ``EpisodeLostError`` when its process
        died or stalled, ``CapacityError`` when other requests keep the process busy."""
        request = {"kind": "step", "game": self.number, "command": command}
        try:
            return await self.pool.ask(self.worker, request, self.pool.config.step_timeout_s, "a step")
        except _ProcessGone as gone:
            raise EpisodeLostError(f"the {self.pool.engine} engine that held this game has ended: {gone}") from gone

    def close(self) -> None:
        """Close the game when its process has time; the caller does not wait."""
        if self.number in self.worker.games:
            self.worker.games.discard(self.number)
            if not self.worker.gone:
                self.pool.close_game(self.worker, self.number)


class _ProcessGone(Exception):
    """The process has ended: no request can be sent."""

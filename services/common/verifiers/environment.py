"""Plays episodes of one verifiers environment in its own process, many at once.

    play --> question, with a number --> process --> answer with the number --> play
                                            |
               end of the process: every episode that it played is an infrastructure failure, and the next one starts another

Invariant: an episode ends with the environment's reward, with ``EnvironmentFailedError`` (its own code failed: no reward, no
retry), or with ``InfrastructureError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any

import structlog

from services.common.aio import deadline
from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.security.keys import without_keys
from services.common.system.processes import exited, how_ended, process_group
from services.common.verifiers.child.messages import Ask, Failed, FailureKind, Opened, Played, Reply
from services.common.verifiers.interpreter import command, variables
from services.common.verifiers.tasks import OPEN_TIMEOUT_S, explained

log = structlog.get_logger(__name__)

_CANCEL_S = 10.0  # a process that does not answer a cancellation for this long hangs
_LINE_BYTES = 16 * 1024 * 1024
_LAST_WORDS_S = 1.0  # for the end of its output, after its own
_LOOK_S = 0.1  # between two looks at whether it has ended
_LOG_BYTES = 16 * 1024
_LAST_LINES = 8
_SHOWN_CHARACTERS = 2000


class EnvironmentFailedError(RuntimeError):
    """The environment's own code failed: the rollout is a failure without a retry."""


class VerifiersEnvironment:
    """The process is started by the first episode, and again by the first one after its end."""

    def __init__(self, environment: str, arguments: Mapping[str, Any]) -> None:
        self._environment, self._arguments = environment, dict(arguments)
        self.where = f"verifiers environment {environment!r}"
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self.num_starts = 0

    async def play(self, task: Mapping[str, Any], *, base_url: str, session: str, model: str) -> Played:
        """One episode of a task. Cancellation ends the episode in the process.

        Raises:
            ConfigError: the environment is not installed, or its settings are wrong.
            EnvironmentFailedError: its code failed.
            InfrastructureError: its process, or a peer of it, failed.
        """
        process = await self._running()
        question = {"ask": Ask.PLAY, "task": dict(task), "base_url": base_url, "session": session, "model": model}
        answer = await process.play(question)
        if Reply.PLAYED in answer:
            return Played(**answer[Reply.PLAYED])
        failed = Failed(**answer[Reply.FAILED])
        if failed.kind == FailureKind.INFRASTRUCTURE:
            raise InfrastructureError(f"{self.where}: {failed.message}")
        raise EnvironmentFailedError(f"{self.where}: {failed.message}")

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()
            self._process = None

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is not None and self._process.has_ended:
                await self.close()
            if self._process is None:
                process = _Process(self.where)
                self.num_starts += 1
                try:
                    await process.start()
                    opened = await self._opened(process)
                except BaseException:
                    await process.close()
                    raise
                log.info(
                    "verifiers.opened", environment=self._environment, version=opened.version, agents=opened.agents
                )
                self._process = process
            return self._process

    async def _opened(self, process: _Process) -> Opened:
        question = {"ask": Ask.OPEN, "environment": self._environment, "arguments": self._arguments}
        try:
            async with deadline(OPEN_TIMEOUT_S, f"loading {self.where}"):
                answer = await process.ask(question)
        except DeadlineError as error:
            raise InfrastructureError(error.message) from error
        if Reply.OPENED not in answer:
            raise ConfigError(f"{self.where}: {explained(Failed(**answer[Reply.FAILED]), self._environment)}")
        return Opened(**answer[Reply.OPENED])


class _Process:
    """One process: its pipes, and the questions that wait for an answer."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack = contextlib.AsyncExitStack()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # 0: the answer to `open`
        self._cancelling: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Lock()
        self._said = b""  # the end of its stderr
        self._process: Process | None = None
        self._end = ""  # the reason of the end
        self._readers: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return bool(self._end)

    async def start(self) -> None:
        try:
            self._process = await self._stack.enter_async_context(
                process_group(
                    *command(),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    limit=_LINE_BYTES,
                    env={**without_keys(os.environ), **variables()},
                )
            )
        except OSError as error:
            raise InfrastructureError(f"{self._where}: its process cannot be started: {error}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read_answers(self._process.stdout), name=f"answers of {self._where}"),
            asyncio.create_task(self._read_log(self._process.stderr), name=f"log of {self._where}"),
        ]
        self._watching = asyncio.create_task(self._watch(self._process), name=f"end of {self._where}")

    async def ask(self, question: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
        """Send a question and wait for its answer. Raises ``InfrastructureError`` at the end of the process."""
        assert self._process is not None and self._process.stdin is not None
        if self._end:
            raise InfrastructureError(self._end)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            await self._process.stdin.drain()
            return await answer
        except (BrokenPipeError, ConnectionResetError) as error:
            raise InfrastructureError(f"{self._where}: its process has ended: {self._last()}") from error
        finally:
            self._waiting.pop(number, None)

    async def play(self, question: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            return await self.ask({**question, "id": number}, number)
        except asyncio.CancelledError:
            if not self._end:
                task = asyncio.create_task(self._cancel(number), name=f"cancel in {self._where}")
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)
            raise

    async def close(self) -> None:
        self._finish("it was closed")
        await self._kill()
        if self._readers:  # they end with the pipes, which only children that left the group keep open
            await asyncio.wait(self._readers, timeout=_LAST_WORDS_S)
        left = [*self._cancelling, *self._readers, *([self._watching] if self._watching is not None else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _kill(self) -> None:
        async with self._ending:  # a second caller waits for the end as well
            await self._stack.aclose()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _cancel(self, number: int) -> None:
        """End an episode. A process that does not answer hangs in the environment's code, and is killed."""
        try:
            async with deadline(_CANCEL_S, f"the end of an episode in {self._where}"):
                while Reply.CANCELLED not in await self.ask({"ask": Ask.CANCEL, "id": number}, number):
                    pass  # the episode's own end came first
        except DeadlineError as error:
            log.warning("verifiers.hangs", error=error.message)
            self._finish("it did not answer: code of the environment blocks its event loop")
            await self._kill()
        except InfrastructureError:
            pass  # it has ended, and the episode with it

    async def _read_answers(self, pipe: asyncio.StreamReader) -> None:
        try:
            while line := await pipe.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer.get("id", 0))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except ValueError as error:  # no JSON, or a line above the limit: not our program
            self._finish(f"it answered in another protocol: {error}")

    async def _watch(self, process: Process) -> None:
        """Tell of the end. The exit code is the sign: servers that it has started may hold its pipes open."""
        answers = self._readers[0]
        while process.returncode is None and not answers.done():
            await asyncio.wait([answers], timeout=_LOOK_S)
        if self._end:
            return
        code = await exited(process)
        await asyncio.wait(self._readers, timeout=_LAST_WORDS_S)
        self._finish(f"it {how_ended(code)}: {self._last()}")

    async def _read_log(self, pipe: asyncio.StreamReader) -> None:
        while piece := await pipe.read(_LOG_BYTES):  # whole lines may be longer than any limit
            self._said = (self._said + piece)[-_LOG_BYTES:]

    def _last(self) -> str:
        lines = self._said.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "\n".join(lines)[-_SHOWN_CHARACTERS:] or "no output"

    def _finish(self, why: str) -> None:
        if self._end:
            return
        self._end = f"the process of {self._where}: {why}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(InfrastructureError(self._end))

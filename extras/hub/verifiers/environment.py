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
from typing import Any, ClassVar

import structlog

from extras.hub.verifiers.child.messages import Failed, FailureKind, Played
from extras.hub.verifiers.tasks import OPEN_TIMEOUT_S, command, explained, interpreter, variables
from services.common.aio import TaskOwner, deadline
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.records import Task
from services.common.security.keys import without_keys
from services.common.system.processes import exited, how_ended, process_group, signal_group
from services.inference.workflows.agents import (
    DEFAULT_MODEL,
    SessionSettings,
    captured_outcome,
    check_endpoint,
    in_session,
)
from services.inference.workflows.base import Outcome, WorkflowContext

log = structlog.get_logger(__name__)

_CANCEL_S = 10.0  # a process that does not answer a cancellation for this long hangs
_LINE_BYTES = 16 * 1024 * 1024
_LAST_WORDS_S = 1.0  # for its last answers, after its end


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
        question = {"ask": "play", "task": dict(task), "base_url": base_url, "session": session, "model": model}
        answer = await process.play(question)
        if "played" in answer:
            return Played(**answer["played"])
        failed = Failed(**answer["failed"])
        if failed.kind == FailureKind.INFRASTRUCTURE:
            raise InfrastructureError(f"{self.where}: {failed.message}")
        raise EnvironmentFailedError(f"{self.where}: {failed.message}")

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()
            self._process = None

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is not None and self._process.end:
                await self.close()
            if self._process is None:
                process = _Process(self.where)
                self.num_starts += 1
                question = {"ask": "open", "environment": self._environment, "arguments": self._arguments}
                try:
                    await process.start()
                    async with deadline(OPEN_TIMEOUT_S, f"loading {self.where}"):
                        answer = await process.ask(question)
                    if "opened" not in answer:
                        told = explained(Failed(**answer["failed"]), self._environment)
                        raise ConfigError(f"{self.where}: {told}")
                except BaseException as error:
                    await process.close()
                    if isinstance(error, DeadlineError):
                        raise InfrastructureError(error.message) from error
                    raise
                log.info("verifiers.opened", environment=self._environment, version=answer["opened"]["version"])
                self._process = process
            return self._process


class _Process:
    """One process: its pipes, and the questions that wait for an answer."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack = contextlib.AsyncExitStack()
        self._tasks = TaskOwner()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # 0: the answer to `open`
        self._process: Process | None = None
        self.end = ""  # the reason of the end

    async def start(self) -> None:
        environment = {**without_keys(os.environ), **variables()}
        try:
            self._process = await self._stack.enter_async_context(
                process_group(*command(), stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES, env=environment)
            )
        except OSError as error:
            raise InfrastructureError(f"{self._where}: its process cannot be started: {error}") from error
        self._tasks.start(self._watch(self._process), f"answers of {self._where}")

    async def ask(self, question: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
        """Send a question and wait for its answer. Raises ``InfrastructureError`` at the end of the process."""
        assert self._process is not None and self._process.stdin is not None
        if self.end:
            raise InfrastructureError(self.end)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: told with the exit code
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def play(self, question: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            return await self.ask({**question, "id": number}, number)
        except asyncio.CancelledError:
            if not self.end:
                self._tasks.start(self._cancel(number), f"cancel in {self._where}")
            raise

    async def close(self) -> None:
        self._finish("it was closed")
        await self._tasks.close()
        await self._stack.aclose()

    async def _cancel(self, number: int) -> None:
        """End an episode. A process that does not answer hangs in the environment's code, and is killed."""
        try:
            async with deadline(_CANCEL_S, f"the end of an episode in {self._where}"):
                while "cancelled" not in await self.ask({"ask": "cancel", "id": number}, number):
                    pass  # the episode's own end came first
        except DeadlineError as error:
            log.warning("verifiers.hangs", error=error.message)
            self._finish("it did not answer: code of the environment blocks its event loop")
            assert self._process is not None
            signal_group(self._process)
        except InfrastructureError:
            pass  # it has ended, and the episode with it

    async def _watch(self, process: Process) -> None:
        """Pass answers on, and tell of the end. The exit code is the sign: servers that it has started may hold its pipe."""
        reading = asyncio.create_task(self._read(process), name=f"read {self._where}")
        ended = asyncio.create_task(exited(process), name=f"end of {self._where}")
        try:
            await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait((reading,), timeout=_LAST_WORDS_S)
            if reading.done() and (error := reading.exception()) is not None:
                self._finish(f"it answered in another protocol: {error}")
            else:
                self._finish(f"it {how_ended(await ended)}; its output is in the replica's log")
        finally:
            reading.cancel()
            ended.cancel()

    async def _read(self, process: Process) -> None:
        """Raises ``ValueError`` for a line that is no JSON, or longer than the limit: not our program."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer.get("id", 0))
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _finish(self, why: str) -> None:
        self.end = self.end or f"the process of {self._where}: {why}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(InfrastructureError(self.end))


# --- ``verifiers``: an environment of the package verifiers plays the rollout, with the endpoint as its model.


class Verifiers:
    Settings: ClassVar[type[SessionSettings]] = SessionSettings

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._environments: dict[str, VerifiersEnvironment] = {}  # by name and arguments; the process lives with ours

    def policies(self) -> tuple[str, ...]:
        return () if self._settings.policy is None else (self._settings.policy,)

    def check(self, recipe: Recipe) -> None:
        """Check the endpoint and the interpreter; ``ConfigError`` names the remedy."""
        check_endpoint(recipe, "environments of verifiers")
        interpreter()

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        environment = self._environment(task)
        model = self._settings.policy or DEFAULT_MODEL
        session, played = await in_session(
            self._settings,
            context,
            lambda base_url, session_id: environment.play(
                task.data["task"], base_url=base_url, session=session_id, model=model
            ),
        )
        if session.last is None:
            raise EnvironmentFailedError(
                f"{environment.where}: it ended without an answer of the model: no tokens to train on"
            )
        return captured_outcome(session, played.reward, played.metrics)

    async def close(self) -> None:
        """End the environments' processes."""
        for environment in self._environments.values():
            await environment.close()

    def _environment(self, task: Task) -> VerifiersEnvironment:
        named: Any = task.data.get("verifiers")
        if not isinstance(named, dict) or "task" not in task.data:
            raise ConfigError(
                f"task {task.task_id} is none of a verifiers environment: write data.train: {{verifiers: NAME}} beside workflow: "
                "{name: verifiers}"
            )
        key = json.dumps(named, sort_keys=True)
        if key not in self._environments:
            self._environments[key] = VerifiersEnvironment(named["environment"], named["arguments"])
        return self._environments[key]

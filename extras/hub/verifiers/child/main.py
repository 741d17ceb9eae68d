"""The process of one verifiers environment: loads it, lists its tasks, and plays its episodes against Rollmill's endpoint.

    stdin: questions --> tasks of one event loop --> stdout: answers (``messages``)
                            | environment, harness, tools
                            v
                         endpoint of the replica, with the session of the rollout

Run by path with the interpreter that has ``verifiers``: its folder is then the first place where modules are found.
The environment's own prints go to stderr. The process ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

from messages import Failed, FailureKind, Played

Send = Callable[[dict[str, Any]], None]
SESSION_HEADER = "X-Rollmill-Session"
_CHAT = "rollmill_chat"
# Errors by the names of verifiers' classes: of machines and peers. The other ones are of the environment's own code.
_INFRASTRUCTURE = {"SandboxError", "TunnelError", "InterceptionError", "ProviderError"}
_SHOWN_CHARACTERS = 2000
_LINE_BYTES = 16 * 1024 * 1024  # of a question, which holds a task


def answers() -> Send:
    """Writes answers to the stdout that the process was started with; prints of the environment go to stderr."""
    file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        file.write(json.dumps(answer).encode() + b"\n")
        file.flush()

    return send


class Service:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._env: Any = None
        self._tasks: Iterator[Any] = iter(())
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._is_serving = False

    async def open(self, question: dict[str, Any]) -> None:
        """Load the environment, and answer with its facts or the reason of the failure."""
        found = await _attempt(asyncio.to_thread(self._load, question["environment"], question["arguments"]))
        if isinstance(found, ModuleNotFoundError):
            self._fail(FailureKind.NOT_INSTALLED, str(found))
        elif isinstance(found, BaseException):
            self._fail(FailureKind.SETTINGS, _text(found))
        else:
            self._send({"opened": found})

    def _load(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The package's version, and whether the tasks never end."""
        try:
            from verifiers import __version__
            from verifiers.v1.utils.loaders import load_environment
        except ModuleNotFoundError as error:
            if error.name == "verifiers.v1":
                raise RuntimeError(
                    "the installed verifiers has no verifiers.v1: Rollmill needs version 0.4 or newer"
                ) from None
            raise
        self._env = load_environment(_configuration(name, arguments))
        return {"version": __version__, "endless": not self._env.taskset.bounded}

    async def tasks(self, question: dict[str, Any]) -> None:
        """Answer with the next tasks as data; none at the end."""
        if not question["start"]:
            self._tasks = iter(self._env.taskset)
        found = await _attempt(asyncio.to_thread(self._next_tasks, question["count"]))
        if isinstance(found, BaseException):
            self._fail(FailureKind.SETTINGS, f"its tasks cannot be loaded: {_text(found)}")
        else:
            self._send({"tasks": found})

    def _next_tasks(self, count: int) -> list[dict[str, Any]]:
        some = itertools.islice(self._tasks, count)
        return [task.data.model_dump(mode="json", exclude_defaults=True) for task in some]

    def play(self, question: dict[str, Any]) -> None:
        number = question["id"]
        task = asyncio.create_task(self._play(number, question))
        self._playing[number] = task
        task.add_done_callback(lambda _: self._playing.pop(number, None))

    def cancel(self, number: int) -> None:
        task = self._playing.get(number)
        if task is not None:
            task.cancel()
        self._send({"id": number, "cancelled": True})

    async def _play(self, number: int, question: dict[str, Any]) -> None:
        episode = await _attempt(self._episode(question))
        if isinstance(episode, BaseException):  # of the environment's code, or of its data of another version
            outcome: Played | Failed = Failed(kind=FailureKind.ENVIRONMENT, message=_text(episode))
        else:
            outcome = _outcome(episode, question["base_url"])
        key = "failed" if isinstance(outcome, Failed) else "played"
        self._send({"id": number, key: asdict(outcome)})

    async def _episode(self, question: dict[str, Any]) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext

        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(question["task"]), self._env.config.taskset.task)
        client = EvalClientConfig(
            base_url=question["base_url"],
            api_key_var="ROLLMILL_NO_KEY",  # the session is the header
            headers={SESSION_HEADER: question["session"]},
        )
        (slot,) = self._env.slots(task)
        return await self._env.run_slot(slot, ModelContext(model=question["model"], client=client))

    async def serve(self, questions: asyncio.StreamReader) -> None:
        """Answer questions until the end of the input."""
        async with contextlib.AsyncExitStack() as stack:
            while line := await questions.readline():
                question = json.loads(line)
                match question["ask"]:
                    case "open":
                        await self.open(question)
                    case "tasks":
                        await self.tasks(question)
                    case "cancel":
                        self.cancel(question["id"])
                    case "play":
                        if await self._serves(stack, question["id"]):
                            self.play(question)
            for task in list(self._playing.values()):
                task.cancel()

    async def _serves(self, stack: contextlib.AsyncExitStack, number: int) -> bool:
        """Start the servers of tools and of the endpoint that all episodes share, with the first episode."""
        if self._is_serving:
            return True
        try:
            await stack.enter_async_context(self._env.serving())
        except Exception as error:  # noqa: BLE001 - of a tool's server, which may raise anything: told to the owner
            failed = Failed(kind=FailureKind.ENVIRONMENT, message=_text(error))
            self._send({"id": number, "failed": asdict(failed)})
            return False
        self._is_serving = True
        return True

    def _fail(self, kind: FailureKind, message: str) -> None:
        self._send({"failed": asdict(Failed(kind=kind, message=message))})


async def _attempt(work: Awaitable[Any]) -> Any:
    """The result, or the exception, of code of the environment, which may raise anything: the owner is told."""
    found = await asyncio.gather(work, return_exceptions=True)
    return found[0]


def _configuration(name: str, arguments: dict[str, Any]) -> Any:
    """The environment's settings: the arguments, and for each agent without a choice of its own the chat harness of this
    folder, on this machine."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    config = dict(arguments)
    taskset = {"id": name, **config.get("taskset", {})}
    config["taskset"] = taskset
    for seat, info in env_config_type(taskset["id"], config.get("id") or "").model_fields.items():
        if not isinstance(info.default, AgentConfig):
            continue
        chosen = dict(config.get(seat) or {})
        if "runtime" not in info.default.model_fields_set:
            chosen.setdefault("runtime", {"type": "subprocess"})
        if info.default.harness is None and default_harness_id(taskset["id"]) == "bash":
            chosen.setdefault("harness", {"id": _CHAT})
        # An episode that the package plays again would leave its first tokens in the rollout; Rollmill plays it again itself.
        chosen["retries"] = {}
        config[seat] = chosen
    config["retries"] = {}
    return resolve_env_config(config)


def _outcome(episode: Any, base_url: str) -> Played | Failed:
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors:
        kind = FailureKind.INFRASTRUCTURE if errors[-1].type in _INFRASTRUCTURE else FailureKind.ENVIRONMENT
        return Failed(kind=kind, message=f"{errors[-1].type}: {errors[-1].message}"[:_SHOWN_CHARACTERS])
    late = [trace.agent.name for trace in episode.traces if trace.is_timeout]
    if late:
        return Failed(
            kind=FailureKind.ENVIRONMENT, message=f"the agent {late[0]} took longer than the environment's time limit"
        )
    for trace in episode.traces:
        client = trace.agent.config.client
        if not trace.agent.trainable and trace.num_turns and client is not None and client.base_url == base_url:
            what = (
                f"the agent {trace.agent.name} is not trained and played with the policy of the run, whose tokens are: name "
                f"another endpoint in settings.{trace.agent.name}.client"
            )
            return Failed(kind=FailureKind.SETTINGS, message=what)
    unscored = [name for trace in episode.traces for name, reward in trace.rewards.items() if reward is None]
    trained = [trace for trace in episode.traces if trace.agent.trainable and trace.rewards]
    if unscored or not trained:
        what = (
            f"its reward {unscored[0]} was not computed"
            if unscored
            else "it gave no reward to an agent that is trained"
        )
        return Failed(kind=FailureKind.ENVIRONMENT, message=what)
    reward = math.fsum(trace.reward for trace in trained) / len(trained)
    return Played(reward=reward, metrics=_metrics(episode.traces))


def _metrics(traces: list[Any]) -> dict[str, float]:
    """Numbers of the episode by name; with several agents, after the agent's name."""
    metrics: dict[str, float] = {}
    for trace in traces:
        prefix = f"{trace.agent.name}_" if len(traces) > 1 else ""
        found = {"turns": trace.num_turns, **trace.metrics}
        found |= {f"reward_{name}": reward.value for name, reward in trace.rewards.items()}
        for name, value in found.items():
            if isinstance(value, int | float) and math.isfinite(value):
                metrics[prefix + name] = float(value)
    return metrics


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]


async def main() -> None:
    questions = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    await Service(answers()).serve(questions)


if __name__ == "__main__":
    asyncio.run(main())

"""One Harbor task: commands of a shell until a turn calls none, then the task's tests.

    reset                 the files of the environment, in a process of the sandbox that lives as long as the episode
    turn with a call      the command runs; its output is the observation
    turn without a call   tests/ comes, tests/test.sh runs, the reward file is the reward; done

The tests and the solution are not in the sandbox before the last turn. The files that the agent's commands leave are its answer:
where the tests give no reward after them, and give one where no command has run, the reward is 0, told in the metrics, as it is
for a sandbox that a command has ended. Tests that give no reward either way lose the episode.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from extras.hub.harbor import LOGS, PATH, TESTS, HarborTask, environment_files, read_task, verifier_files
from extras.hub.settings import HarborConfig, HubSections
from services.common.config.envgateway import LiveConfig
from services.common.errors import CapacityError, DatasetError, InfrastructureError, InvalidRequestError
from services.common.text.tools import MalformedCall, cut_text, find_call, parse_json_call
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.bare.wire import SHELL
from services.envgateway.sandbox.live import CellResult, LiveProcess
from services.envgateway.sandbox.pool import LiveSlots
from services.envgateway.sandbox.records import WRITABLE

if TYPE_CHECKING:
    from services.envgateway.sandbox.pool import SandboxPool

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the task's shell and return what it prints. Files stay, variables do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
_HOW = """

You work in a shell without a network, in the directory {workdir}. To run a command, write

<tool_call>{{"name": "bash", "arguments": {{"command": "ls"}}}}</tool_call>

and its output comes back; one command in each reply. A reply without a command ends the task."""
COMMAND_TIME_S = 30.0  # of one command; then it is stopped, and the agent is told
VERIFIER_TIME_S = 45.0  # of tests/test.sh; a task's `verifier.timeout_sec` may be less
_CPU_TIME_S = 600.0  # of all commands and the tests of a task together
_MEMORY_BYTES, _MOST_MEMORY_BYTES = 1 << 30, 4 << 30  # of a task that names none, and of one that does
_DISK_BYTES = 256 << 20  # of all files of a task, which are in memory too; its `environment.storage_mb` may be less
_OUTPUT_BYTES = 1 << 20  # that one command may print; then it is stopped
_LATE_S = 3600.0  # of a policy that answers slowly after the agent's time: never the reason of a reward
_AGENT_TIME_S = 3600.0  # before the tests; a task's `agent.timeout_sec` may be less
_MOST_CHARS = 4000  # of its output before the agent; the middle is cut
_SPARE_S = 5.0  # between the time of a command and that of its turn
_INSIDE = Path(__file__).with_name("harbor_inside.py").read_text(encoding="utf-8")


class NoRewardError(EpisodeLostError):
    """The tests ran and gave no reward: a fault of the tests, or of the files that the agent left."""


class HarborEpisode:
    def __init__(
        self,
        slots: LiveSlots,
        config: HarborConfig,
        clock: Callable[[], float] = time.monotonic,
        judged_untouched: dict[str, bool] | None = None,
    ) -> None:
        """``judged_untouched``: whether a task's tests give a reward before any command, by the task's directory; shared by
        the episodes of a gateway."""
        self._slots, self._config, self._clock = slots, config, clock
        self._judged_untouched = {} if judged_untouched is None else judged_untouched
        self._row: Mapping[str, Any] = {}
        self._task: HarborTask
        self._process: LiveProcess | None = None
        self._deadline = 0.0
        self._commands = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin. Nothing is drawn, so the seed is not read.

        Raises:
            InvalidRequestError: no task directory, or one that cannot be played here.
            CapacityError: all live processes of the sandbox are in use.
        """
        try:
            self._row, self._task = task, _task_of(task, self._config)
            files = environment_files(self._task)
        except DatasetError as error:
            raise InvalidRequestError(error.message) from error
        dockerfile = self._task.dockerfile
        disk_bytes = min(self._task.storage_bytes or _DISK_BYTES, _DISK_BYTES)
        limits = LiveConfig.model_construct(
            cell_time_s=max(COMMAND_TIME_S, VERIFIER_TIME_S) + _SPARE_S,
            cpu_time_s=_CPU_TIME_S,
            lifetime_s=min(self._task.agent_s, _AGENT_TIME_S) + VERIFIER_TIME_S + _LATE_S,
            memory_bytes=min(self._task.memory_bytes or _MEMORY_BYTES, _MOST_MEMORY_BYTES),
            output_bytes=_OUTPUT_BYTES,
        )
        bounds = {
            "processes": 64, "disk_bytes": disk_bytes, "file_bytes": _DISK_BYTES, "num_files": 8192, "open_files": 256,
        }  # fmt: skip
        self._process = await LiveProcess.start(self._slots, limits, "", profile=SHELL, bounds=bounds)
        await self._must(_INSIDE)
        variables = {"PATH": PATH, **dockerfile.variables}
        await self._must(_call("begin", WRITABLE, str(dockerfile.workdir), variables))
        await self._must(_call("put", base64.b64encode(files).decode()))
        self._deadline = self._clock() + min(self._task.agent_s, _AGENT_TIME_S)
        text = self._task.instruction.rstrip() + _HOW.format(workdir=dockerfile.workdir)
        return Observation(text=text, tools=(TOOL,))

    async def step(self, action: str) -> StepResult:
        assert self._process is not None, "stepped before reset, or after the end"
        content = find_call(action)
        late = self._clock() >= self._deadline
        if content is None or late:
            return await self._end({"agent_timeouts": float(late)})
        command = _command_in(content)
        if isinstance(command, MalformedCall):
            return StepResult(observation=f"Error: {command.error}", metrics=self._metrics(invalid_commands=1.0))
        self._commands += 1
        result = await self._process.run(_call("command", command, COMMAND_TIME_S))
        if not result.alive:
            return self._ended_by_its_command(result)
        said = (result.stdout + result.stderr).decode(errors="replace").rstrip()
        if result.status is RunStatus.OUTPUT_LIMIT:
            said += "\n(the command printed too much and was stopped)"
        elif result.status is not RunStatus.OK:
            raise EpisodeLostError(f"task {self._task.name}: a command ended as {result.status}: {result.error}")
        return StepResult(observation=cut_text(said or "(no output)", _MOST_CHARS), metrics=self._metrics())

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _end(self, metrics: Mapping[str, float]) -> StepResult:
        """Run the tests. Raises ``EpisodeLostError`` where the reason of a missing reward is not the agent's."""
        try:
            reward, others = await self._run_tests()
        except NoRewardError:
            await self.close()  # its place is needed for the comparison
            if not (self._commands and await self._gives_a_reward_untouched()):
                raise
            reward, others = 0.0, {"tests_spoiled": 1.0}
        return StepResult(
            reward=reward, done=True, status=EndStatus.COMPLETED, metrics={**self._metrics(), **others, **metrics}
        )

    async def _run_tests(self) -> tuple[float, dict[str, float]]:
        """The reward and other numbers of the tests.

        Raises:
            NoRewardError: the tests gave none.
            EpisodeLostError: the tests could not be run.
        """
        name = self._task.name
        try:
            files = verifier_files(self._task)
        except DatasetError as error:
            raise EpisodeLostError(error.message) from error
        limit_s = min(self._task.verifier_s, VERIFIER_TIME_S)
        given = _call("verify", limit_s, TESTS, LOGS, base64.b64encode(files).decode(), self._task.verifier_variables)
        result = await self._ask(given)
        if result.status is not RunStatus.OK:
            why = result.detail or result.error or result.stderr.decode(errors="replace")[-200:]
            kind = NoRewardError if result.status.is_about_the_program else EpisodeLostError
            raise kind(f"task {name}: the tests ended as {result.status}: {why}")
        try:
            outcome = json.loads(result.stdout.strip().rpartition(b"\n")[2])
        except ValueError:
            raise EpisodeLostError(f"task {name}: the sandbox told no outcome of the tests") from None
        if not outcome.pop("ended"):
            raise NoRewardError(f"task {name}: test.sh did not end within {limit_s:g} s")
        return reward_of(outcome, name)

    async def _gives_a_reward_untouched(self) -> bool:
        """Whether the same tests give a reward where no command has run. Raises ``EpisodeLostError`` where that cannot be
        tried now."""
        directory = str(self._task.directory)
        if directory not in self._judged_untouched:
            untouched = HarborEpisode(self._slots, self._config)
            try:
                await untouched.reset(self._row, 0)
                await untouched._run_tests()
                self._judged_untouched[directory] = True
            except NoRewardError:
                self._judged_untouched[directory] = False
            except (CapacityError, InfrastructureError) as error:
                raise EpisodeLostError(
                    f"task {self._task.name}: its tests gave no reward, and could not be tried before any command: {error.message}"
                ) from error
            finally:
                await untouched.close()
        return self._judged_untouched[directory]

    def _ended_by_its_command(self, result: CellResult) -> StepResult:
        """The process of the sandbox is gone. Raises ``EpisodeLostError`` where the machine is at fault."""
        if not result.status.is_about_the_program:
            raise EpisodeLostError(f"task {self._task.name}: the sandbox was lost: {result.detail or result.status}")
        return StepResult(
            observation=f"(the command ended the sandbox: {result.status}: {result.detail})",
            done=True,
            status=EndStatus.INVALID_ACTION,
            metrics=self._metrics(sandboxes_ended=1.0),
        )

    async def _ask(self, code: str) -> CellResult:
        assert self._process is not None
        return await self._process.run(code)

    async def _must(self, code: str) -> None:
        """Raises ``InfrastructureError`` where a part of the beginning fails."""
        result = await self._ask(code)
        if result.status is not RunStatus.OK:
            why = result.stderr.decode(errors="replace")[-500:] or result.detail or result.error
            raise InfrastructureError(
                f"task {self._task.name}: its sandbox could not be prepared: {result.status}: {why}"
            )

    def _metrics(self, **more: float) -> dict[str, float]:
        return {"commands": float(self._commands), **more}


def _task_of(row: Mapping[str, Any], config: HarborConfig) -> HarborTask:
    column = row.get("harbor")
    if not isinstance(column, Mapping) or not isinstance(column.get("directory"), str):
        raise InvalidRequestError(
            "the task has no column 'harbor' with a directory: the environment harbor plays rows of data.train.harbor only"
        )
    task = read_task(Path(column["directory"]))
    if task.refusal and not config.skip_run:
        raise InvalidRequestError(task.refusal)
    return task


def _command_in(content: str | MalformedCall) -> str | MalformedCall:
    call = content if isinstance(content, MalformedCall) else parse_json_call(content)
    if isinstance(call, MalformedCall):
        return call
    command = call.arguments.get("command")
    if call.name != "bash" or not isinstance(command, str):
        return MalformedCall(error='write {"name": "bash", "arguments": {"command": "..."}}')
    if "\0" in command or len(command) > 100_000:
        return MalformedCall(error="the command has a zero byte, or more than 100,000 characters")
    return command.encode(errors="replace").decode()


def _call(name: str, *arguments: Any) -> str:
    """A cell that calls a function of ``inside``; prints no value."""
    packed = base64.b64encode(json.dumps(arguments).encode()).decode()
    return f"_ = {name}(*json.loads(base64.b64decode('{packed}')))"


TIER = "2"  # the only one with a root of its own, where /app, /tests and /logs are the task's


class HarborWorld:
    is_remote = True  # an error of its code is never the action's

    def __init__(self, config: HarborConfig, sandbox: SandboxPool | None) -> None:
        self._config, self._sandbox = config, sandbox
        self._judged_untouched: dict[str, bool] = {}

    def build(self) -> HarborEpisode:
        assert self._sandbox is not None, "a gateway has one"
        return HarborEpisode(self._sandbox.live, self._config, judged_untouched=self._judged_untouched)

    async def close(self) -> None:
        """Nothing is left: episodes end their own processes."""


def make_world(config: HubSections, sandbox: SandboxPool | None) -> HarborWorld | str:
    """Without a sandbox, as in a check, the tier is that of the user."""
    tier = sandbox.tier if sandbox is not None else TIER if os.geteuid() == 0 else "of a user without root"
    return why_not(tier) or HarborWorld(config.harbor, sandbox)


def why_not(tier: str) -> str:
    """Why the tasks cannot be played at this tier; empty at tier 2."""
    if tier == TIER:
        return ""
    return (
        f"its tasks need a root directory of their own, which the sandbox has at tier {TIER} only, and it runs at tier {tier}: start "
        "the gateway as root with CAP_SYS_ADMIN (in a container: --cap-add SYS_ADMIN)"
    )


_MAIN = "reward"  # of several rewards, the one that counts
_NUMBERS: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, FiniteFloat], config=ConfigDict(strict=True))
_NUMBER: TypeAdapter[float] = TypeAdapter(FiniteFloat)


def reward_of(files: Mapping[str, str | None], task: str) -> tuple[float, dict[str, float]]:
    """As Harbor does, from ``reward.json`` before ``reward.txt``: the reward, and the other numbers of ``reward.json``. ``files``: name to content in base64, None where there is none.

    Raises:
        NoRewardError: no file, an empty one, no finite number, or several without one called ``reward``.
    """
    found = {name: base64.b64decode(content) for name, content in files.items() if content is not None}
    if "reward.json" in found:
        try:
            numbers = _NUMBERS.validate_json(found["reward.json"])
        except ValidationError as error:
            first = error.errors()[0]
            raise NoRewardError(
                f"task {task}: reward.json cannot be read: {first['loc']}: {first['msg']:.120}"
            ) from None
        if not numbers or (_MAIN not in numbers and len(numbers) > 1):
            raise NoRewardError(
                f"task {task}: reward.json has {', '.join(sorted(numbers))!s:.120} and no {_MAIN!r}: which one counts?"
            )
        main = _MAIN if _MAIN in numbers else next(iter(numbers))
        return numbers[main], {f"reward_{name}": value for name, value in numbers.items() if name != main}
    if "reward.txt" not in found:
        raise NoRewardError(f"task {task}: test.sh wrote neither /logs/verifier/reward.txt nor reward.json")
    text = found["reward.txt"].decode(errors="replace").strip()
    try:
        return _NUMBER.validate_python(text), {}
    except ValidationError:
        raise NoRewardError(f"task {task}: reward.txt holds {text!r:.80}, which is no finite number") from None

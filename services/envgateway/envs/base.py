"""Interface of environments.

An environment is one class, one instance per episode, named by import path in the recipe
(``envgateway.environments: {name: package.module:Class}``). Its methods may be plain or async:

    class Guess:
        def __init__(self, context: EnvironmentContext) -> None: ...
        def reset(self, task: Mapping[str, Any], seed: int) -> Observation: ...
        def step(self, action: str) -> StepResult: ...
        def close(self) -> None: ...

or a class in the style of gymnasium (``envs/gymnasium.py``). A ``World`` holds the state that episodes of one kind
share, such as a catalogue or processes.

``InfrastructureError`` from ``step`` means that the turn did not happen and may be repeated; ``EpisodeLostError``, or
any other exception, ends the episode. None is ever a reward.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import Field, ValidationError

from services.common.config.base import Section
from services.common.errors import GraderFailedError, InfrastructureError, InvalidRequestError
from services.common.importing import told
from services.common.telemetry.metrics import RolloutKey
from services.common.text.tools import STATUS_METRIC, MalformedCall, find_call
from services.common.tools import ToolResult
from services.envgateway.calls import RewardOutcome
from services.envgateway.rewards.registry import Rewards
from services.envgateway.tools.registry import GatewayToolSession, ToolBox
from services.envgateway.tools.tools import StateLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The first message to the policy."""

    text: str
    admissible_actions: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, OpenAI style
    messages: Sequence[Mapping[str, str]] = ()  # the same text as a chat (role, content), if longer than one turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a turn."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    admissible_actions: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # countable facts, such as tool_errors
    status: str = ""  # reason of the end, in AgentBench's words where they exist: see ``EndStatus``


class EndStatus(enum.StrEnum):
    """AgentBench's words for how an episode ended. Those of its machinery are errors here."""

    COMPLETED = "completed"
    CONTEXT_LIMIT = "agent context limit"
    VALIDATION_FAILED = "agent validation failed"
    INVALID_ACTION = "agent invalid action"
    TURN_LIMIT = "task limit reached"


class EpisodeLostError(InfrastructureError):
    """The episode's state is lost or unusable: no turn can be taken again."""


class ActionFailedError(EpisodeLostError):
    """An engine raised at a command. Its game is lost; the process continues."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """Services that the gateway gives to environments."""

    rewards: Rewards
    tools: ToolBox


class EnvironmentLike(Protocol):
    """One episode's world."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]: ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]: ...

    def close(self) -> Awaitable[None] | None: ...


EnvironmentFactory = Callable[[EnvironmentContext], EnvironmentLike]


class World(Protocol):
    """State shared by the episodes of one kind. A world loads data only for its first episode.

    A world may have attributes: ``gauges`` (name -> number), ``is_remote`` (its errors are never the action's) and
    ``is_indexed`` (rows name their tasks by ``index`` alone).
    """

    def build(self) -> EnvironmentLike: ...

    async def close(self) -> None:
        """Called once, after every episode was closed."""
        ...


# --- Settings that a task's row may carry for its environment, under the key ``environment``; and the row's question.


_QUESTION_KEYS = ("question", "problem", "prompt")


class SingleStepSettings(Section):
    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""


class ToolCallsSettings(Section):
    tools: list[str] = ["python"]
    """Tools of the gateway that the policy may call."""
    max_response_chars: int | None = Field(default=None, ge=16)
    """A longer tool response is cut; left out, each tool's own length: 256."""


class ToolSettings(SingleStepSettings, ToolCallsSettings):
    max_turns: int = Field(default=5, ge=1)
    """Turns; the call of the last one is not executed."""


AnySettings = TypeVar("AnySettings", bound=Section)


def settings_of(task: Mapping[str, Any], kind: type[AnySettings]) -> AnySettings:
    try:
        return kind.model_validate(task.get("environment") or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("environment", *first["loc"])))
        raise InvalidRequestError(f"the task's {where}: {first['msg']}") from error


def question_of(task: Mapping[str, Any]) -> str:
    for key in _QUESTION_KEYS:
        value = task.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # a list of chat messages
            return str(value[-1].get("content", ""))
    raise InvalidRequestError(f"the task has no question: it needs one of {', '.join(_QUESTION_KEYS)}")


# --- Environments around the gateway's rewards and tools: ``single_step``, ``tool`` and ``tools``.


class SingleStep:
    """A question, one answer, its reward."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._rewards = context.rewards
        self._task: Mapping[str, Any] = {}
        self._settings = SingleStepSettings()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._task = task
        self._settings = settings_of(task, SingleStepSettings)
        return Observation(text=question_of(task))

    async def step(self, action: str) -> StepResult:
        return await graded_end(self._rewards, self._settings.reward, self._task, action, {})

    async def close(self) -> None:
        pass


async def graded_end(
    rewards: Rewards, name: str, task: Mapping[str, Any], answer: str, metrics: Mapping[str, float]
) -> StepResult:
    """The last step of an episode. A grader that failed is the machine's fault: no reward, the turn may be repeated."""
    result = await rewards.compute(name, task, answer)
    if result.outcome is RewardOutcome.GRADER_FAILED:
        raise GraderFailedError(f"the grader of reward {name!r} failed: {result.detail}")
    graded = {RolloutKey.REWARD_UNPARSED.value: float(result.outcome is RewardOutcome.UNPARSED)}
    if result.opaque:
        graded[RolloutKey.REWARD_OPAQUE.value] = 1.0
    return StepResult(reward=result.reward, done=True, metrics={**graded, **metrics})


class ToolCalls:
    """Tool calls only, for workflows that keep turns and answers themselves.

    An action is the text between the tags of a call, one JSON object; the observation is the tool's response. The
    episode is never done and its rewards are 0; closing the episode ends the state of its tools. The metrics are those
    of all its calls so far, and ``tool_status_<status>`` of the last one.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._rewards = context.rewards
        self._box = context.tools
        self._session: GatewayToolSession | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return await self._begin(settings_of(task, ToolCallsSettings), "")

    async def step(self, action: str) -> StepResult:
        result = await self._answered(action)
        assert self._session is not None
        metrics = {**self._session.statistics.metrics(), f"{STATUS_METRIC}{result.status}": 1.0}
        return StepResult(observation=result.text, metrics=metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _begin(self, settings: ToolCallsSettings, text: str) -> Observation:
        self._session = await GatewayToolSession.open(self._box, settings.tools, settings.max_response_chars)
        return Observation(text=text, tools=self._session.schemas)

    async def _answered(self, content: str | MalformedCall) -> ToolResult:
        """A call's result; where a tool's state is lost, so is the episode."""
        assert self._session is not None
        try:
            return await self._session.answer(content)
        except StateLostError as error:
            raise EpisodeLostError(error.message) from error


class ToolLoop(ToolCalls):
    """A question, tool calls that the gateway runs, an answer, its reward.

    action with a call --------> the tool's response; next turn
    action without a call -----> graded; done
    the last turn's action ----> graded, its call is not run; done
    """

    def __init__(self, context: EnvironmentContext) -> None:
        super().__init__(context)
        self._task: Mapping[str, Any] = {}
        self._settings = ToolSettings()
        self._turns = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._task = task
        self._settings = settings_of(task, ToolSettings)
        return await self._begin(self._settings, question_of(task))

    async def step(self, action: str) -> StepResult:
        assert self._session is not None
        content = find_call(action)
        if content is None or self._turns + 1 >= self._settings.max_turns:
            metrics = self._session.statistics.metrics()
            result = await graded_end(self._rewards, self._settings.reward, self._task, action, metrics)
        else:
            text = (await self._answered(content)).text
            result = StepResult(observation=text, metrics=self._session.statistics.metrics())
        self._turns += 1
        return result


# --- Base class of the environments that users write: one object per episode.


class Environment:
    """A subclass writes ``reset(self, task, seed) -> Observation`` and ``step(self, action) -> StepResult``, plain or async.

    ``InfrastructureError`` from ``step`` means that the turn did not happen and may be repeated. Any exception that is not one of
    Rollmill's ends the episode as an infrastructure failure, which is never a reward.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        """``context`` has the gateway's rewards and tools."""
        self.context = context

    def close(self) -> None:
        """Release the episode's resources; called once."""


# --- Classifies an environment's failure: caused by the action's bytes, or by the machine.


DATA_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
_SHOWN_CHARS = 500
_SHOWN_FRAMES = 5


def short_text(error: BaseException) -> str:
    """Kind and message, shortened: an error may repeat its input, which may have megabytes."""
    return told(error)[:_SHOWN_CHARS]


def trace_of(error: BaseException) -> str:
    """The place of the exception, without its message and values: formatting those for a log may take minutes."""
    return "".join(traceback.format_tb(error.__traceback__)[-_SHOWN_FRAMES:])


# No command of a text world is that long; similarity and engines take time for each word.
MOST_COMMAND_CHARS = 500

"""Protocols and types for workflows: policies, gateway, context, outcome.

A workflow is one asynchronous method: given a task, the policies it may call and the environment gateway, it plays
one rollout and returns its sequences with their rewards. A workflow uses no gRPC, protobuf or engine, so that a test needs
only a few lines of fakes.

An infrastructure failure is never a reward: let ``InfrastructureError`` pass, and the rollout is played again.
"""

from __future__ import annotations

import copy
import difflib
import enum
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from pydantic import Field

from services.common.aio import deadline
from services.common.config.base import Section
from services.common.dataset_rows import BuiltInReward, prompt_in
from services.common.errors import (
    ConfigError,
    DatasetError,
    PromptTooLongError,
    UnknownPolicyError,
)
from services.common.importing import check_call, load_object
from services.common.records import Origin, Purpose, Sampling, Segment, StopReason, Task, TokenSequence
from services.common.system.threads import DaemonThreads
from services.common.telemetry.accounts import ActivityName, during_here
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Chat, Message
from services.common.text.thoughts import THOUGHT
from services.inference.engine.base import FinishReason, Generation, Watch


class PolicyClient(Protocol):
    """One policy in one rollout. The implementation names and seeds the requests."""

    @property
    def name(self) -> str: ...

    @property
    def chat(self) -> Chat: ...

    @property
    def context_length(self) -> int: ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None
    ) -> Generation:
        """Sample one continuation that ends at a stop token of the chat, the budget, the context, or when
        ``watch`` returns True. ``seed`` replaces the rollout's own."""
        ...


class ProgramStatus(enum.StrEnum):
    """The end of a program, or the verdict on it for one case. An infrastructure failure is an ``InfrastructureError``, not
    a status."""

    OK = "ok"
    WRONG_ANSWER = "wrong_answer"  # of a case only
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"  # of a case only: an execution shows the compiler's message as a runtime error
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    INVALID_REQUEST = "invalid_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of a sandboxed program."""

    status: ProgramStatus
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    wall_time_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that began."""

    episode_id: str
    observation: str
    admissible_actions: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas
    messages: tuple[Message, ...] = ()  # the observation as turns of user and assistant, where it is a chat

    def opening(self) -> list[Message]:
        """The first messages to the policy: turns of user and assistant that alternate and end with the user's. Other
        orders, which some chat templates refuse, and an observation without turns are one user message."""
        roles = [message["role"] for message in self.messages]
        if roles and roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.observation}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one turn of an episode."""

    observation: str
    reward: float
    done: bool
    admissible_actions: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score. ``unparsed``: no answer could be read from the completion; ``opaque``: the program can forge it."""

    value: float
    unparsed: bool = False
    detail: str = ""
    opaque: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the graded sequence."""
        opaque = {RolloutKey.REWARD_OPAQUE.value: 1.0} if self.opaque else {}
        return {RolloutKey.REWARD_UNPARSED.value: float(self.unparsed), **opaque}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCase:
    """One case: text in and out of a program, or positional arguments (a list) and returned value of a function."""

    given: Any
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The outcome of one case. Outputs are cut to a readable length."""

    verdict: ProgramStatus
    detail: str = ""
    stdout: str = ""
    stderr: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is ProgramStatus.OK


class Gateway(Protocol):
    """The environment gateway. Every call raises ``InfrastructureError`` after an infrastructure failure."""

    async def execute_code(
        self, code: str, *, stdin: bytes = b"", print_trailing_expression: bool = False
    ) -> Execution: ...

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode: ...

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        """``turn`` counts up from 1; repeating a turn gives its stored result."""
        ...

    async def close(self, episode_id: str) -> None: ...

    async def compute_reward(self, reward: str, task: Task, completion: str) -> Reward: ...

    async def judge(
        self, code: str, cases: Sequence[JudgeCase], *, entry_point: str = "", case_time_s: float = 6.0
    ) -> tuple[CaseOutcome, ...]:
        """One outcome per case, in order. ``entry_point``: "function" or "Class().method"; empty for a program that
        reads stdin and prints."""
        ...


class Endpoint(Protocol):
    """The HTTP endpoint where external agents call the policies of one rollout."""

    @property
    def base_url(self) -> str: ...

    def opened(self, session: Any) -> AbstractContextManager[str]:
        """Serve a ``CapturedSession`` under the id that this context yields; its end cancels the session's requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """The policies, gateway and settings of one rollout."""

    policies: Mapping[str, PolicyClient]
    gateway: Gateway
    sampling: Sampling
    seed: int  # of this slot: for sampling, and for the workflow's own draws
    episode_seed: int  # of the task group: for shared draws, such as an environment's start
    purpose: Purpose = Purpose.TRAIN
    endpoint: Endpoint | None = None  # of this replica, if there is one

    def policy(self, name: str | None = None) -> PolicyClient:
        """The named policy; without a name, the only one."""
        if name is None:
            if len(self.policies) != 1:
                raise ConfigError(
                    f"this run has the policies {sorted(self.policies)}: name one in workflow.settings.policy"
                )
            return next(iter(self.policies.values()))
        if name not in self.policies:
            raise UnknownPolicyError(f"no policy {name!r} here; this replica serves {sorted(self.policies)}")
        return self.policies[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one rollout: its sequences, and the reward that evaluation averages."""

    sequences: tuple[TokenSequence, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Workflow(Protocol):
    """Built once per replica from its ``Settings``; ``run`` is called for many rollouts at once.

    A workflow that uses policies by name lists them in ``def policies(self) -> tuple[str, ...]``, so that a recipe without
    them is refused before the start. A workflow with further requirements has ``def check(self, recipe: Recipe) -> None``,
    which raises ``ConfigError``.
    """

    Settings: ClassVar[type[Section]]

    def __init__(self, settings: Any) -> None: ...

    async def run(self, task: Task, context: WorkflowContext) -> Outcome: ...


# --- A growing conversation with one policy: the segments of a sequence, exactly as sampled.


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The policy's text of one turn, with the tag of a thought that the template begins. ``ended``: by its own stop token,
    not by a budget."""

    text: str
    num_tokens: int
    ended: bool


class Conversation:
    """``max_response_tokens`` bounds all tokens after the prompt, the environment's included. ``thinking`` turns the chat
    template's thinking on or off, if supported; None leaves its default. ``assistant_prefill`` begins every
    turn of the policy: environment tokens, which are not trained."""

    def __init__(
        self,
        policy: PolicyClient,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        thinking: bool | None = None,
        assistant_prefill: str = "",
    ) -> None:
        self._policy = policy
        self._chat = policy.chat.with_thinking(thinking).with_prefill(assistant_prefill)
        self._sampling = sampling
        prompt = self._chat.prompt_ids(messages, tools)
        longest = policy.context_length - 1  # at least one token must be new
        if max_prompt_tokens is not None:
            longest = min(longest, max_prompt_tokens)
        if len(prompt) > longest:
            raise PromptTooLongError(f"the prompt has {len(prompt)} tokens; at most {longest} are allowed")
        self._ids = list(prompt)
        self._limit = policy.context_length  # tokens of the whole sequence
        if max_response_tokens is not None:
            self._limit = min(self._limit, len(prompt) + max_response_tokens)
        self._segments = [Segment.environment(prompt)]
        self.num_turns = 0
        self.num_sampled = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._ids)

    async def generate(self) -> Turn:
        """Let the policy take a turn."""
        generation = await self.sample(self._sampling)
        sampled = self.take(generation)
        ended = generation.finish_reason is FinishReason.STOP
        text = self._chat.decode(sampled)
        if self._chat.thinks and not text.lstrip().startswith(THOUGHT):
            text = THOUGHT + text  # which the template wrote: readers of the text alone tell thought and answer apart
        return Turn(text=text, num_tokens=len(sampled), ended=ended)

    async def sample(self, sampling: Sampling, *, watch: Watch | None = None, seed: int | None = None) -> Generation:
        """Generate the policy's next turn within the remaining budgets; ``take`` adds the turn to the conversation."""
        return await self._policy.generate(self._ids, self._within_room(sampling), watch=watch, seed=seed)

    def take(self, generation: Generation) -> list[int]:
        """Make a sampled turn, or the beginning of one, part of the conversation; returns its tokens."""
        sampled = [token for segment in generation.segments for token in segment.token_ids.tolist()]
        self._ids += sampled
        self._segments += generation.segments
        self.num_turns += 1
        self.num_sampled += len(sampled)
        return sampled

    def add(self, *messages: Message) -> bool:
        """Append the environment's answer. False, without appending, if no token could follow."""
        self._chat.check_follows(messages)
        ids = self._chat.continuation_ids(messages, last_sampled=self._ids[-1])
        if len(self._ids) + len(ids) >= self._limit:
            return False
        self._ids += ids
        self._segments.append(Segment.environment(ids))
        return True

    def num_tokens_with(self, *messages: Message) -> int:
        """The number of tokens that ``add`` of these messages would give."""
        return self.num_tokens + len(self._chat.continuation_ids(messages, last_sampled=self._ids[-1]))

    def fork(self, num_segments: int, *messages: Message) -> Conversation | None:
        """A conversation that goes on behind the first segments with ``messages``. These segments, exactly as sampled, are a
        part of its prompt: none of their tokens is trained in it. None if no token could follow."""
        self._chat.check_follows(messages)
        ids = [token for segment in self._segments[:num_segments] for token in segment.token_ids.tolist()]
        ids += self._chat.continuation_ids(messages, last_sampled=ids[-1])
        if len(ids) >= self._limit:
            return None
        forked = copy.copy(self)
        forked._ids = ids
        forked._segments = [Segment.environment(ids)]
        forked.num_turns = forked.num_sampled = 0
        return forked

    def take_back(self) -> None:
        """Undo the last ``add``, if no turn followed."""
        added = self._segments.pop()
        assert not added.is_policy and self._segments, "no segment to take back"
        del self._ids[len(self._ids) - added.num_tokens :]

    def sequence(
        self,
        *,
        reward: float,
        stop_reason: StopReason,
        metrics: Mapping[str, float] | None = None,
        role: str = "agent",
        attempt: int = 0,
        thread: int = 0,
        parent: int | None = None,
        origin: Origin = Origin.ROOT,
    ) -> TokenSequence:
        """The record of this conversation."""
        return TokenSequence(
            policy=self._policy.name,
            role=role,
            attempt=attempt,
            thread=thread,
            parent=parent,
            origin=origin,
            segments=tuple(self._segments),
            reward=reward,
            stop_reason=stop_reason,
            metrics={"turns": float(self.num_turns), "response_tokens": float(self.num_sampled), **(metrics or {})},
        )

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def _within_room(self, sampling: Sampling) -> Sampling:
        room = self._limit - len(self._ids)
        if room >= sampling.max_new_tokens:
            return sampling
        return replace(sampling, max_new_tokens=room, min_new_tokens=min(room, sampling.min_new_tokens))


# --- Builds the messages of a prompt from a dataset row; the settings that all built-in workflows share.


class PromptSettings(Section):
    policy: str | None = None
    """The policy that plays; left out, the only one of the recipe."""
    prompt_field: str | None = None
    """Column with the prompt: text, or a list of messages. Left out, the first of `messages`, `prompt`, `problem`
    and `question` that a row has."""
    system: str | None = None
    """System turn before a prompt that has none."""
    instruction: str = ""
    """Text after the last user turn, such as "Reason step by step and put the answer into \\boxed{}.". It follows after a
    blank line, unless one of them has white space there already, or it begins with a mark that goes on with the turn."""
    thinking: bool | None = None
    """Turn the thinking of the chat template on or off, if supported (Qwen3); left out, the template's default."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """A longer prompt is a failed rollout (PROMPT_TOO_LONG); left out, the context is the bound."""

    def named_policies(self) -> tuple[str, ...]:
        """The policy that the settings name, if they do."""
        return () if self.policy is None else (self.policy,)


def build_messages(
    settings: PromptSettings, task: Task, system_suffix: str = "", *, bare: bool = False
) -> list[Message]:
    """The messages of a task, with the system turn and the instruction of the settings; ``bare``: without the instruction.

    A row's ``starter_code`` is shown after the last user turn, unless the turn has the code already.
    """
    prompt = prompt_in(task.data, settings.prompt_field, f"task {task.task_id}")
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = _with_starter_code(messages, task)
    has_system = messages[0].get("role") == "system"
    system = str(messages[0]["content"]) if has_system else (settings.system or "")
    if system_suffix:
        system = f"{system}\n\n{system_suffix}" if system else system_suffix
    if has_system:
        messages = messages[1:]
    if settings.instruction and not bare:
        if not messages or not isinstance(messages[-1].get("content"), str):
            raise DatasetError(f"task {task.task_id}: the instruction needs a last message with text")
        messages = with_last_text(messages, with_instruction(messages[-1]["content"], settings.instruction))
    return [{"role": "system", "content": system}, *messages] if system else messages


def with_instruction(text: str, instruction: str) -> str:
    r"""The text of a turn with the instruction after it, and a blank line between words that would touch.

    >>> with_instruction("2 + 2?", "Answer with a number."), with_instruction("2 + 2", " = ?")
    ('2 + 2?\n\nAnswer with a number.', '2 + 2 = ?')
    """
    are_glued = text[-1:].strip() and instruction[:1].strip() and instruction[0] not in ".,;:!?)"
    return f"{text}\n\n{instruction}" if are_glued else text + instruction


def _with_starter_code(messages: list[Message], task: Task) -> list[Message]:
    code = task.data.get("starter_code")
    text = messages[-1].get("content")
    if not isinstance(code, str) or not code.strip() or not isinstance(text, str) or code.strip() in text:
        return messages
    return with_last_text(messages, f"{text}\n\nStarter code:\n\n```python\n{code.strip(chr(10))}\n```")


def with_last_text(messages: list[Message], text: str) -> list[Message]:
    """The same conversation with another last user turn."""
    return [*messages[:-1], {**messages[-1], "content": text}]


def fill(template: str, **values: str) -> str:
    """Put values for ``{names}``, all at once: braces in a value or elsewhere in the template stay as they are.

    >>> fill("{a} and {b}, \\\\boxed{}", a="{b}", b="c")
    '{b} and c, \\\\boxed{}'
    """
    pattern = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    return pattern.sub(lambda found: values[found.group()[1:-1]], template)


# --- Asks for a program as the task's tests will run it: one that reads stdin, or a function of the right name.


WRITE_PROGRAM = """Solve this programming problem in Python 3.

{problem}

Your program reads standard input and prints the answer to standard output, nothing else. Write the whole program into \
one block that begins with ```python and ends with ```."""
WRITE_FUNCTION = """Solve this programming problem in Python 3.

{problem}

Your code is called as `{entry_point}`. Write all of it, imports included and without calls of your own, into one block \
that begins with ```python and ends with ```."""
_CHECK_CALL = re.compile(r"^check\(([\w.()]+)\)\s*$", re.MULTILINE)


def entry_point_of(tests: Mapping[str, Any]) -> str | None:
    """The entry point of a task's programs: a function's name, "" for programs that read stdin, None if unknown.

    >>> entry_point_of({"kind": "assert", "tests": "...\\ncheck(Solution().add)", "entry_point": ""})
    'Solution().add'
    """
    if tests.get("kind") == "stdin":
        return ""
    if tests.get("entry_point"):
        return str(tests["entry_point"])
    calls = _CHECK_CALL.findall(str(tests.get("tests", "")))
    return calls[-1] if calls and calls[-1] != "candidate" else None


def asking_for_program(messages: list[Message], task: Task) -> list[Message]:
    """The conversation with its last turn inside the prompt; unchanged if the tests do not name an entry point."""
    tests = task.data.get("tests")
    entry_point = entry_point_of(tests if isinstance(tests, Mapping) else {})
    if entry_point is None:
        return messages
    template = WRITE_FUNCTION if entry_point else WRITE_PROGRAM
    problem = str(messages[-1]["content"])
    return with_last_text(messages, fill(template, problem=problem, entry_point=entry_point))


# --- Computes rewards: by the gateway's RewardService under a built-in name, or by a function of this process.


RewardFunction = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
Grader = Callable[[Gateway, Task, str], Awaitable[Reward]]

# Of a function of the user, from its beginning; one that takes longer fails the rollout and is never a reward.
REWARD_TIMEOUT_S = 60.0
_THREAD_WAIT_S = (
    600.0  # for a free thread, which a rollout waits for only where a workflow scores several answers at once
)
REWARD_THREADS = DaemonThreads(4)  # more as the service has more slots
_BOXED_INTEGER = re.compile(r"\\boxed\{\s*([+-]?\d+)\s*\}")


def build_grader(reward: str) -> Grader:
    """``module:function`` runs here; any other name is scored by the gateway."""
    if ":" not in reward:
        if reward not in tuple(BuiltInReward):
            raise ConfigError(_no_reward(reward))

        async def remote(gateway: Gateway, task: Task, completion: str) -> Reward:
            return await gateway.compute_reward(reward, task, completion)

        return remote

    function: RewardFunction = load_object(reward)
    check_call(function, reward, "def reward(task, completion) -> float", "task", "completion")

    async def local(gateway: Gateway, task: Task, completion: str) -> Reward:
        given = await call_reward(function, reward, task, completion)
        return Reward(value=finite_reward(given, reward, f"task {task.task_id}"))

    return local


async def call_reward(function: Callable[..., Any], reward: str, task: Task, judged: Any) -> Any:
    """The value of the user's function ``reward`` for a task and what is judged. Raises ``DeadlineError`` after
    ``REWARD_TIMEOUT_S``."""
    what = f"reward {reward} of task {task.task_id}"
    limit = deadline(_THREAD_WAIT_S, f"the wait of {what} for a thread")
    with during_here(ActivityName.RUNNING_REWARD.of(reward)):
        async with limit:
            # In a thread: a function that never returns must not stop the replica's other rollouts.
            return await REWARD_THREADS.call(
                function, task.data, judged, on_begin=partial(limit.begin_again, REWARD_TIMEOUT_S, what)
            )


def _no_reward(name: str) -> str:
    """The error about a reward that is neither a built-in one nor an import path."""
    module, _, function = name.rpartition(".")
    close = (
        [f"{module}:{function}"]
        if module
        else difflib.get_close_matches(name, [each.value for each in BuiltInReward], n=1)
    )
    meant = f", did you mean {close[0]!r}?" if close else "."
    return (
        f"workflow.settings.reward: there is no reward {name!r}{meant} Write one of {', '.join(sorted(BuiltInReward))}, or the "
        "import path of a function, package.module:function"
    )


def finite_reward(given: Any, reward: str, where: str) -> float:
    """The number that a reward function returned; raises ``ValueError`` for None, text, NaN and other things that are none.

    >>> finite_reward(True, "rewards:exact", "task 7")
    1.0
    """
    hint = ": is a `return` missing in one of its branches?" if given is None else ""
    try:
        number = float(given) if not isinstance(given, str | bytes | None) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        given = number = math.inf  # its digits may be too many to show
    if not math.isfinite(number):
        shown = given if isinstance(given, float) else repr(given)[:60]
        raise ValueError(f"reward {reward} returned {shown} for {where}; must be a finite number{hint}")
    return number


def boxed_integer(task: Mapping[str, Any], completion: str) -> float:
    """1 when the last well-formed ``\\boxed{}`` with an integer equals ``task["answer"]``, else 0.

    >>> boxed_integer({"answer": "1786"}, r"it is \\boxed{1786}")
    1.0
    """
    answers = _BOXED_INTEGER.findall(completion)
    return float(bool(answers) and int(answers[-1]) == int(task["answer"]))


# --- Parses a verifier's decision from its text.


_TAG = re.compile(r"<verdict>((?:(?!</?verdict>).)*+)</verdict>", re.DOTALL | re.IGNORECASE)
_APPROVES = re.compile(r"\bapprove[ds]?\b", re.IGNORECASE)
_REJECTS = re.compile(r"\breject(?:s|ed|ing|ion)?\b", re.IGNORECASE)


class ReviewVerdict(enum.StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    UNPARSED = "unparsed"


def read_verdict(text: str) -> ReviewVerdict:
    """The verdict by the rules above.

    >>> read_verdict("It is wrong. <verdict>reject</verdict>"), read_verdict("I approve it.")
    (<ReviewVerdict.REJECT: 'reject'>, <ReviewVerdict.APPROVE: 'approve'>)
    """
    words = [tag.strip().strip(".!*\"'").lower() for tag in _TAG.findall(text)]
    tagged = [word for word in words if word in (ReviewVerdict.APPROVE, ReviewVerdict.REJECT)]
    if tagged:
        return ReviewVerdict(tagged[-1])
    approves, rejects = bool(_APPROVES.search(text)), bool(_REJECTS.search(text))
    if approves == rejects:
        return ReviewVerdict.UNPARSED
    return ReviewVerdict.APPROVE if approves else ReviewVerdict.REJECT

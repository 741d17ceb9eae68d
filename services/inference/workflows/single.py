"""``actor_verifier``: one policy solves, another verifies, and after a rejection the first tries once more.

    solve --> verify --approve or unparsed--> done
                '-----reject--> solve again, with the verifier's words --> done

Credit: each solution has its own correctness, 1 or 0; the verifier 1 when its verdict (``verdicts`` has the rules) agrees
with the correctness of the first solution, else 0, also for an unreadable verdict or one cut by its budget. Evaluation
counts the last solution of a rollout. A verification whose prompt does not fit the context is left out, and so is such a
second try; the earlier samples still count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from services.common.dataset_rows import HARBOR
from services.common.errors import PromptTooLongError
from services.common.importing import check_call, load_object, place_of
from services.common.records import Purpose, StopReason, Task, TokenSequence
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Message
from services.inference.workflows.base import (
    Conversation,
    Episode,
    Gateway,
    Outcome,
    PromptSettings,
    ReviewVerdict,
    Reward,
    Turn,
    WorkflowContext,
    asking_for_program,
    build_grader,
    build_messages,
    fill,
    read_verdict,
    with_instruction,
    with_last_text,
)

VERIFY = """You check the work of another solver. Read the problem and the proposed solution below, redo every step that \
matters, and look for the first mistake. A solution counts only when its final answer is right.

Problem:
{problem}

Proposed solution:
{solution}

Explain what you found. End with <verdict>approve</verdict> when the final answer is right, \
or with <verdict>reject</verdict> when it is not."""
TRY_AGAIN = """{problem}

An earlier attempt at this problem was rejected. The checker wrote:
{review}

Solve the problem again from the beginning. Use what is right in the checker's words, and do not repeat the mistake."""


Evidence = Callable[[Gateway, Task, str], Awaitable[str]]


# --- Base class of users' workflows, and a conversation that records its stop reason.


class WorkflowSettings(PromptSettings):
    """Settings of a user's workflow: those of every prompt, and a reward. Subclasses add fields with defaults."""

    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""


class Workflow:
    """Base class. A subclass writes ``async def run(self, task, context) -> Outcome``, and may have ``Settings`` of its own.

    One object per replica; ``run`` is called for many rollouts at once, so a rollout's state stays in local variables.
    """

    Settings: ClassVar[type[WorkflowSettings]] = WorkflowSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.grader = build_grader(settings.reward)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not (isinstance(cls.Settings, type) and issubclass(cls.Settings, WorkflowSettings)):
            raise TypeError(
                f"{place_of(cls)}{cls.__name__}.Settings: write `class Settings(rollmill.WorkflowSettings)`"
            )

    def policies(self) -> tuple[str, ...]:
        """The policies that the workflow uses by name; a recipe without them is refused."""
        return tuple(self.settings.named_policies())

    def converse(
        self,
        task: Task,
        context: WorkflowContext,
        *,
        policy: str | None = None,
        messages: Sequence[Message] | None = None,
        role: str = "agent",
        attempt: int = 0,
        **changes: Any,
    ) -> Dialogue:
        """Begin a conversation with a policy: the settings' one unless another is named, and the task's prompt unless there
        are ``messages``. ``changes``: settings of this conversation alone, such as ``thinking``.

        Raises ``PromptTooLongError`` for a prompt that does not fit, ``DatasetError`` for a row without one.
        """
        settings = self.settings.model_copy(update=changes) if changes else self.settings
        conversation = Conversation(
            context.policy(policy or settings.policy),
            build_messages(settings, task) if messages is None else messages,
            context.sampling,
            max_prompt_tokens=settings.max_prompt_tokens,
            thinking=settings.thinking,
        )
        return Dialogue(self, task, context, conversation, role, attempt)

    def converse_if_it_fits(self, task: Task, context: WorkflowContext, **begun: Any) -> Dialogue | None:
        """As ``converse``, with the context as the bound of the prompt; None for a prompt that does not fit."""
        try:
            return self.converse(task, context, max_prompt_tokens=None, **begun)
        except PromptTooLongError:
            return None


def begin_check(workflow: Workflow, task: Task, context: WorkflowContext, prompt: str) -> Dialogue | None:
    """The conversation with the verifier that a workflow's settings name; None for a prompt that does not fit."""
    settings: Any = workflow.settings
    messages = [{"role": "user", "content": prompt}]
    told = {"policy": settings.verifier, "thinking": settings.verifier_thinking, "role": "verifier"}
    return workflow.converse_if_it_fits(task, context, messages=messages, **told)


class Dialogue:
    """One conversation with one policy. Keeps the exact samples; derives the stop reason from the last turn."""

    def __init__(
        self,
        workflow: Workflow,
        task: Task,
        context: WorkflowContext,
        conversation: Conversation,
        role: str,
        attempt: int,
    ) -> None:
        self.conversation = conversation
        self.turns: list[Turn] = []
        self._workflow, self._task, self._context = workflow, task, context
        self._role, self._attempt = role, attempt
        self._unanswered = False  # a message was appended, and no turn followed
        self._full = False  # a message had no room
        self.graded: Reward | None = None  # the newest

    @property
    def text(self) -> str:
        """The policy's last turn; empty before the first."""
        return self.turns[-1].text if self.turns else ""

    async def respond(self) -> str:
        """Let the policy take a turn; returns its text."""
        turn = await self.conversation.generate()
        self.turns.append(turn)
        self._unanswered = False
        return turn.text

    def say(self, text: str, role: str = "user") -> bool:
        """Append a message for the policy. False, without appending, if the dialogue cannot go on: the last turn was cut short,
        or the context is full."""
        if self.turns and not self.turns[-1].ended:
            return False
        self._unanswered = self.conversation.add({"role": role, "content": text})
        self._full = not self._unanswered
        return self._unanswered

    async def grade(self, text: str | None = None) -> float:
        """The reward of the settings for the last turn, or for ``text``.

        Raises ``InfrastructureError`` when the grader failed: let it pass, and the rollout is played again.
        """
        reward = await self._workflow.grader(self._context.gateway, self._task, self.text if text is None else text)
        self.graded = reward
        return reward.value

    def sequence(self, reward: float, stop_reason: StopReason | None = None, **metrics: float) -> TokenSequence:
        """The record of this conversation, with its reward."""
        if self._unanswered:
            self.conversation.take_back()
        cut = self._full or not self.turns or not self.turns[-1].ended
        deduced = StopReason.LENGTH if cut else StopReason.TURN_LIMIT if self._unanswered else StopReason.STOP
        self._unanswered = False
        counted: Mapping[str, float] = {
            RolloutKey.TRUNCATED.value: float(cut),
            **(self.graded.metrics if self.graded is not None else {}),
            **metrics,
        }
        return self.conversation.sequence(
            reward=reward, stop_reason=stop_reason or deduced, metrics=counted, role=self._role, attempt=self._attempt
        )

    def outcome(self, reward: float, stop_reason: StopReason | None = None, **metrics: float) -> Outcome:
        """The outcome of a rollout that has this conversation alone. ``metrics`` are numbers of the rollout."""
        numbers = {name: float(value) for name, value in metrics.items()}
        return Outcome(sequences=(self.sequence(reward, stop_reason),), reward=reward, metrics=numbers)


# --- ``single_turn``: one prompt, one generation, one reward.


class SingleTurnSettings(WorkflowSettings):
    programs: bool = False
    """Ask for a program, as `codegen_verifier` asks its coder: the row's tests decide whether the program
    reads stdin or has a function of some name."""


class SingleTurn(Workflow):
    Settings: ClassVar[type[WorkflowSettings]] = SingleTurnSettings

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        messages = build_messages(self.settings, task)
        if self.settings.programs:
            messages = asking_for_program(messages, task)
        chat = self.converse(task, context, messages=messages)
        await chat.respond()
        return chat.outcome(await chat.grade())


# --- ``actor_verifier``.


class ActorVerifierSettings(WorkflowSettings):
    verifier: str = "model1"
    """The policy that checks. `policy` is the one that solves."""
    verifier_thinking: bool | None = None
    """`thinking` of the verifier."""
    verify_prompt: str = VERIFY
    """The verifier's prompt, with `{problem}` (without `instruction`), `{solution}` and `{evidence}`."""
    evidence: str | None = None
    """Further text for the verifier, such as a test log: the import path of a function
    `async def evidence(gateway, task, solution) -> str`. An infrastructure failure there is raised, never shown to a
    policy."""
    retry_prompt: str = TRY_AGAIN
    """The solver's prompt after a rejection, with `{problem}`, its first `{solution}` and the verifier's `{review}`;
    `instruction` follows it."""


class ActorVerifier(Workflow):
    Settings: ClassVar[type[WorkflowSettings]] = ActorVerifierSettings

    def __init__(self, settings: ActorVerifierSettings) -> None:
        super().__init__(settings)
        self._evidence: Evidence | None = load_object(settings.evidence) if settings.evidence else None
        if self._evidence is not None:
            wanted, where = "async def evidence(gateway, task, solution) -> str", "workflow.settings.evidence"
            check_call(self._evidence, f"{where}: {settings.evidence}", wanted, "gateway", "task", "solution")

    def policies(self) -> tuple[str, ...]:
        return (self.settings.policy or "model0", self.settings.verifier)

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        solver, _ = self.policies()
        first = self.converse(task, context, policy=solver, role="solver")
        solution = await first.respond()
        final = first_reward = await first.grade()
        sequences = [first.sequence(first_reward)]
        metrics = {"first_correct": first_reward}
        problem = str(build_messages(self.settings, task, bare=True)[-1]["content"])
        check = await self._begin_check(task, context, problem, solution)
        if check is None:
            return Outcome(sequences=tuple(sequences), reward=final, metrics={**metrics, "verification_skipped": 1.0})
        review = await check.respond()
        # A review that was cut short ends with no verdict.
        verdict = read_verdict(review) if check.turns[-1].ended else ReviewVerdict.UNPARSED
        agrees = verdict is not ReviewVerdict.UNPARSED and (verdict is ReviewVerdict.APPROVE) == (first_reward > 0)
        verdicts = {f"verdict_{name}": float(verdict is name) for name in ReviewVerdict}
        sequences.append(check.sequence(float(agrees), None, **verdicts))
        if verdict is ReviewVerdict.REJECT:
            second = self._begin_again(task, context, problem, solution, review)
            if second is None:
                metrics["retry_skipped"] = 1.0
            else:
                await second.respond()
                final = await second.grade()
                sequences.append(second.sequence(final))
        metrics["solved_by_retry"] = float(final > first_reward)
        return Outcome(sequences=tuple(sequences), reward=final, metrics=metrics)

    async def _begin_check(self, task: Task, context: WorkflowContext, problem: str, solution: str) -> Dialogue | None:
        settings = self.settings
        evidence = await self._evidence(context.gateway, task, solution) if self._evidence else ""
        # One policy's text must not end or begin a turn of the other.
        as_text = context.policy(settings.verifier).chat.as_text
        prompt = fill(settings.verify_prompt, problem=problem, solution=as_text(solution), evidence=as_text(evidence))
        return begin_check(self, task, context, prompt)

    def _begin_again(
        self, task: Task, context: WorkflowContext, problem: str, solution: str, review: str
    ) -> Dialogue | None:
        settings, (solver, _) = self.settings, self.policies()
        as_text = context.policy(solver).chat.as_text
        prompt = fill(settings.retry_prompt, problem=problem, solution=as_text(solution), review=as_text(review))
        messages = with_last_text(build_messages(settings, task), with_instruction(prompt, settings.instruction))
        return self.converse_if_it_fits(task, context, policy=solver, messages=messages, role="solver", attempt=1)


# --- ``agent_env``: plays an episode in an environment of the gateway; one sequence, with the observations masked out.


class AgentEnvSettings(PromptSettings):
    environment: str = "textworld"
    """The gateway's environment, such as `alfworld`, `webshop` or `textworld`."""
    max_turns: int = Field(default=15, ge=1)
    """Turns of a training episode."""
    evaluation_max_turns: int | None = Field(default=None, ge=1)
    """Turns of an evaluation episode; left out, as in training."""
    turn_discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Factor on the return for every turn taken; negative returns shrink, too."""
    failure_penalty: float | None = None
    """Reward of an episode whose return is at most `failure_threshold`; left out, its return is its reward."""
    failure_threshold: float = 1e-3
    """The largest return of a failed episode."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Bound of everything after the first observation; left out, the context is the bound."""


class AgentEnv:
    Settings: ClassVar[type[AgentEnvSettings]] = AgentEnvSettings

    def __init__(self, settings: AgentEnvSettings) -> None:
        self._settings = settings

    def policies(self) -> tuple[str, ...]:
        return self._settings.named_policies()

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        episode = await context.gateway.create_episode(self._settings.environment, task, context.episode_seed)
        try:
            return await self._play(episode, context)
        finally:
            await context.gateway.close(episode.episode_id)

    async def _play(self, episode: Episode, context: WorkflowContext) -> Outcome:
        settings = self._settings
        messages = episode.opening()
        messages = with_last_text(messages, with_instruction(messages[-1]["content"], settings.instruction))
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        conversation = Conversation(
            context.policy(settings.policy),
            messages,
            context.sampling,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_response_tokens=settings.max_response_tokens,
            thinking=settings.thinking,
        )
        max_turns = settings.max_turns
        if context.purpose is Purpose.EVALUATION:
            max_turns = settings.evaluation_max_turns or max_turns
        total, cut_turns, stop, metrics = 0.0, 0, StopReason.TURN_LIMIT, dict[str, float]()
        while conversation.num_turns < max_turns:
            turn = await conversation.generate()
            cut_turns += not turn.ended
            step = await context.gateway.step(episode.episode_id, conversation.num_turns, turn.text)
            total += step.reward
            metrics = dict(step.metrics)
            if step.done:
                stop = StopReason.ENVIRONMENT
                break
            if conversation.num_turns == max_turns:
                break
            if not conversation.add({"role": "user", "content": step.observation}):
                stop = StopReason.LENGTH
                break
        if stop is not StopReason.ENVIRONMENT and settings.environment == HARBOR:
            step = await context.gateway.step(episode.episode_id, conversation.num_turns + 1, "")
            total += step.reward
            metrics = dict(step.metrics)
        achieved = total > settings.failure_threshold
        shaped = total * settings.turn_discount**conversation.num_turns
        if settings.failure_penalty is not None and not achieved:
            shaped = settings.failure_penalty
        sequence = conversation.sequence(
            reward=shaped,
            stop_reason=stop,
            metrics={
                **{f"environment_{name}": value for name, value in metrics.items()},
                "return": total,
                "achieved": float(achieved),
                "cut_turns": float(cut_turns),
                RolloutKey.TRUNCATED.value: float(stop is StopReason.LENGTH),
            },
        )
        return Outcome(sequences=(sequence,), reward=total)

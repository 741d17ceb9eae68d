"""``actor_verifier``: one policy solves, another verifies, and after a rejection the first tries once more.

    solve --> verify --approve or unparsed--> done
                '-----reject--> solve again, with the verifier's words --> done

Credit: each solution has its own correctness, 1 or 0; the verifier 1 when its verdict (``verdicts`` has the rules) agrees
with the correctness of the first solution, else 0, also for an unreadable verdict or one cut by its budget. Evaluation
counts the last solution of a rollout. A verification whose prompt does not fit the context is left out, and so is such a
second try; the earlier samples still count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from pydantic import Field

from services.common.errors import PromptTooLongError
from services.common.importing import load_object
from services.common.records.types import Sequence as TokenSequence
from services.common.records.types import StopReason, Task
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Message
from services.common.user_code import check_call
from services.inference.workflows.base import Gateway, Outcome, PolicyClient, Reward, WorkflowContext
from services.inference.workflows.conversation import Conversation, Turn
from services.inference.workflows.prompts import PromptSettings, build_messages, fill, with_instruction, with_last_text
from services.inference.workflows.rewards import build_grader
from services.inference.workflows.verdicts import ReviewVerdict, read_verdict

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


class ActorVerifierSettings(PromptSettings):
    verifier: str = "model1"
    """The policy that checks. `policy` is the one that solves."""
    verifier_thinking: bool | None = None
    """`thinking` of the verifier."""
    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""
    verify_prompt: str = VERIFY
    """The verifier's prompt, with `{problem}` (without `instruction`), `{solution}` and `{evidence}`."""
    evidence: str | None = None
    """Further text for the verifier, such as a test log: the import path of a function
    `async def evidence(gateway, task, solution) -> str`. An infrastructure failure there is raised, never shown to a
    policy."""
    retry_prompt: str = TRY_AGAIN
    """The solver's prompt after a rejection, with `{problem}`, its first `{solution}` and the verifier's `{review}`;
    `instruction` follows it."""
    max_review_chars: int | None = Field(default=None, ge=1)
    """Keep only the end of a longer review in the retry; left out, the whole review."""


class ActorVerifier:
    Settings: ClassVar[type[ActorVerifierSettings]] = ActorVerifierSettings

    def __init__(self, settings: ActorVerifierSettings) -> None:
        self._settings = settings
        self._grade = build_grader(settings.reward)
        self._evidence: Evidence | None = load_object(settings.evidence) if settings.evidence else None
        if self._evidence is not None:
            wanted = "async def evidence(gateway, task, solution) -> str"
            check_call(
                self._evidence,
                f"workflow.settings.evidence: {settings.evidence}",
                wanted,
                "gateway",
                "task",
                "solution",
            )

    def policies(self) -> tuple[str, ...]:
        return (self._settings.policy or "model0", self._settings.verifier)

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        settings = self._settings
        messages = build_messages(settings, task)
        problem = str(build_messages(settings, task, bare=True)[-1]["content"])
        solver = context.policy(settings.policy or "model0")
        verifier = context.policy(settings.verifier)

        first = Conversation(
            solver,
            messages,
            context.sampling,
            max_prompt_tokens=settings.max_prompt_tokens,
            thinking=settings.thinking,
        )
        solution = await first.generate()
        first_reward = await self._grade(context.gateway, task, solution.text)
        sequences = [_solution(first, solution, first_reward, attempt=0)]
        metrics = {"first_correct": first_reward.value}
        final = first_reward.value

        evidence = await self._evidence(context.gateway, task, solution.text) if self._evidence else ""
        review = await self._verify(problem, solution, evidence, verifier, context)
        if review is None:
            return Outcome(sequences=tuple(sequences), reward=final, metrics={**metrics, "verification_skipped": 1.0})
        check, words = review
        # A review that was cut short ends with no verdict.
        verdict = read_verdict(words.text) if words.ended else ReviewVerdict.UNPARSED
        agrees = verdict is not ReviewVerdict.UNPARSED and (verdict is ReviewVerdict.APPROVE) == (
            first_reward.value > 0
        )
        sequences.append(
            check.sequence(
                reward=float(agrees),
                stop_reason=_stop(words),
                metrics={f"verdict_{name}": float(verdict is name) for name in ReviewVerdict},
                role="verifier",
            )
        )
        if verdict is ReviewVerdict.REJECT:
            again = await self._retry(messages, problem, solution.text, words.text, context)
            if again is None:
                metrics["retry_skipped"] = 1.0
            else:
                second, solution = again
                reward = await self._grade(context.gateway, task, solution.text)
                sequences.append(_solution(second, solution, reward, attempt=1))
                final = reward.value
        metrics["solved_by_retry"] = float(final > first_reward.value)
        return Outcome(sequences=tuple(sequences), reward=final, metrics=metrics)

    async def _verify(
        self, problem: str, solution: Turn, evidence: str, verifier: PolicyClient, context: WorkflowContext
    ) -> tuple[Conversation, Turn] | None:
        # One policy's text must not end or begin a turn of the other.
        said, shown = verifier.chat.as_text(solution.text), verifier.chat.as_text(evidence)
        prompt = fill(self._settings.verify_prompt, problem=problem, solution=said, evidence=shown)
        try:
            check = Conversation(
                verifier,
                [{"role": "user", "content": prompt}],
                context.sampling,
                thinking=self._settings.verifier_thinking,
            )
        except PromptTooLongError:
            return None
        return check, await check.generate()

    async def _retry(
        self, messages: list[Message], problem: str, solution: str, review: str, context: WorkflowContext
    ) -> tuple[Conversation, Turn] | None:
        settings = self._settings
        if settings.max_review_chars is not None:
            review = review[-settings.max_review_chars :]
        solver = context.policy(settings.policy or "model0")
        prompt = fill(
            settings.retry_prompt,
            problem=problem,
            solution=solver.chat.as_text(solution),
            review=solver.chat.as_text(review),
        )
        prompt = with_instruction(prompt, settings.instruction)
        try:
            second = Conversation(
                solver,
                with_last_text(messages, prompt),
                context.sampling,
                thinking=settings.thinking,
            )
        except PromptTooLongError:
            return None
        return second, await second.generate()


def _solution(conversation: Conversation, turn: Turn, reward: Reward, *, attempt: int) -> TokenSequence:
    return conversation.sequence(
        reward=reward.value,
        stop_reason=_stop(turn),
        metrics={RolloutKey.TRUNCATED.value: float(not turn.ended), **reward.metrics},
        role="solver",
        attempt=attempt,
    )


def _stop(turn: Turn) -> StopReason:
    return StopReason.STOP if turn.ended else StopReason.LENGTH

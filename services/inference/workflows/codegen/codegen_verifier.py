"""``codegen_verifier``: one policy writes a program, another writes test cases, and after a failure the first tries again.

    write --> (examples left out) make cases --> run the program on them --all pass--> done
                                                        '---a case fails, or cases are missing---> write again

The verifier reads the problem and the first program. The decision to try again reads the generated cases only, never the
ground truth; the second prompt has all cases with the program's results, and not the program. Credit: each program
has its own correctness, 1 when it passes every test of the task, else 0; the verifier's is ``verifier_reward``
(``generated_cases.verifier_reward`` has the formulas). The reference solution is the first of the row's solutions that
passes every test of the task. A task without one is counted as ``reference_missing``; rewards that need a reference are
then not earned. Evaluation counts the last program of a rollout.

Left out and counted, while the earlier samples still count: a verification or a second try whose prompt does not fit the
context, and the verification of a task that does not say how its programs are called. An infrastructure failure during
judging fails the rollout, which is played again: such a failure is never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.errors import PromptTooLongError
from services.common.records.types import Purpose, StopReason, Task
from services.common.records.types import Sequence as TokenSequence
from services.common.telemetry.metrics import RolloutKey
from services.common.text.chat import Message
from services.common.text.programs import program_of, with_preamble
from services.common.text.thoughts import after_thoughts
from services.inference.workflows.base import (
    CaseOutcome,
    JudgeCase,
    Outcome,
    PolicyClient,
    ProgramStatus,
    Reward,
    WorkflowContext,
)
from services.inference.workflows.codegen import codegen_prompts
from services.inference.workflows.codegen.generated_cases import (
    GeneratedCases,
    VerifierReward,
    entry_point_of,
    needs_retry,
    read_cases,
    report,
    verifier_reward,
)
from services.inference.workflows.codegen.problem_text import without_examples
from services.inference.workflows.codegen.program_prompts import asking_for_program
from services.inference.workflows.conversation import Conversation, Turn
from services.inference.workflows.prompts import PromptSettings, build_messages, fill, with_last_text
from services.inference.workflows.rewards import build_grader


class CodegenVerifierSettings(PromptSettings):
    verifier: str = "model1"
    """The policy that writes test cases. `policy` is the one that writes programs."""
    thinking: bool | None = False
    """Thinking of the coder, if the chat template supports thinking; null leaves the template's default."""
    verifier_thinking: bool | None = True
    """`thinking` of the verifier."""
    reward: str = "code"
    """Ground truth of a program: a reward of the gateway, or the import path of a function (`package.module:function`)."""
    verifier_reward: VerifierReward = "coupled"
    """`coupled`: last program right + reference solution passes the cases. `own`: half for cases that the reference passes,
    half when they also agree with the ground truth about the first program."""
    num_cases: int = Field(default=2, ge=1, le=16)
    """Test cases that are requested. Further cases of the verifier are left out; with fewer, none counts."""
    case_time_s: float = Field(default=6.0, gt=0)
    """Time of a program on one generated case; at most that of `envgateway.sandbox`."""
    evaluate: Literal["coder", "all"] = "coder"
    """The part that an evaluation plays: the coder's first program alone, or all turns."""
    max_report_chars: int = Field(default=1000, ge=40)
    """Most characters of each input and output in the report to the coder; longer ones are cut in the middle."""
    program_prompt: str = codegen_prompts.WRITE_PROGRAM
    """The coder's prompt when programs read stdin, with `{problem}`."""
    function_prompt: str = codegen_prompts.WRITE_FUNCTION
    """The coder's prompt when a function is called, with `{problem}` and `{entry_point}`."""
    program_test_prompt: str = codegen_prompts.TEST_PROGRAM
    """The verifier's prompt when programs read stdin, with `{problem}`, `{program}` and `{num_cases}`."""
    function_test_prompt: str = codegen_prompts.TEST_FUNCTION
    """The verifier's prompt when a function is called, with `{problem}`, `{program}`, `{num_cases}` and `{entry_point}`."""
    retry_prompt: str = codegen_prompts.TRY_AGAIN
    """The coder's prompt when its program was not accepted, with `{problem}`, `{program}` and `{report}`."""


_MAX_KNOWN_REFERENCES = 4096  # tasks whose reference solution is remembered
_NO_PROGRAM = "(there is no program in the answer)"


@dataclass(frozen=True, slots=True)
class _Job:
    """One task with its policies and context."""

    task: Task
    context: WorkflowContext
    entry_point: str | None  # "" for programs that read stdin, None when the task does not say
    preamble: str  # code that a program may continue
    solutions: tuple[str, ...]  # of the row, unchanged

    @classmethod
    def of(cls, task: Task, context: WorkflowContext) -> _Job:
        found = task.data.get("tests")
        tests: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        written = task.data.get("solutions") or [task.data.get("solution")]
        return cls(
            task=task,
            context=context,
            entry_point=entry_point_of(tests),
            preamble=str(tests.get("preamble") or ""),
            solutions=tuple(text for text in written if isinstance(text, str) and text.strip()),
        )

    async def run_on(self, program: str, cases: Sequence[JudgeCase], case_time_s: float) -> tuple[CaseOutcome, ...]:
        """The outcomes of a program on generated cases."""
        if not cases:
            return ()
        if not program.strip():
            nothing = CaseOutcome(verdict=ProgramStatus.INVALID_REQUEST, detail="there is no program in the answer")
            return (nothing,) * len(cases)
        entry_point = self.entry_point or ""
        code = with_preamble(program, self.preamble, entry_point)
        return await self.context.gateway.judge(code, cases, entry_point=entry_point, case_time_s=case_time_s)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A program of the coder with its judgement by the ground truth."""

    conversation: Conversation
    turn: Turn
    program: str
    reward: Reward

    @property
    def correct(self) -> bool:
        return self.reward.value >= 1.0

    def sequence(self, number: int) -> TokenSequence:
        return self.conversation.sequence(
            reward=self.reward.value,
            stop_reason=_stop(self.turn),
            metrics={
                RolloutKey.TRUNCATED.value: float(not self.turn.ended),
                **self.reward.metrics,
            },
            role="coder",
            attempt=number,
        )


@dataclass(frozen=True, slots=True)
class _Check:
    """The verifier's text, the parsed cases, and the first program's outcomes."""

    conversation: Conversation
    turn: Turn
    read: GeneratedCases
    outcomes: tuple[CaseOutcome, ...]

    @property
    def rejects(self) -> bool:
        return needs_retry(self.outcomes)

    def sequence(self, reward: float, valid: bool | None) -> TokenSequence:
        return self.conversation.sequence(
            reward=reward,
            stop_reason=_stop(self.turn),
            metrics={
                RolloutKey.TRUNCATED.value: float(not self.turn.ended),
                "cases": float(len(self.read.cases)),
                "cases_left_out": float(self.read.num_left_out),
                "cases_unparsed": float(not self.read.cases),
                "cases_failed": float(sum(not outcome.passed for outcome in self.outcomes)),
                "cases_valid": float(valid is True),
            },
            role="verifier",
        )


class CodegenVerifier:
    Settings: ClassVar[type[CodegenVerifierSettings]] = CodegenVerifierSettings

    def __init__(self, settings: CodegenVerifierSettings) -> None:
        self._settings = settings
        self._grade = build_grader(settings.reward)
        # By task and solutions: the rollouts of a task group have the same reference.
        self._references: dict[tuple[str, ...], str | None] = {}

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        """Plays one rollout: a program, in training the test cases for it, after a failure a second program."""
        job = _Job.of(task, context)
        first = await self._write(job, self._messages(job), self._settings.max_prompt_tokens)
        metrics = {"first_correct": float(first.correct)}
        if context.purpose is Purpose.EVALUATION and self._settings.evaluate == "coder":
            return Outcome(sequences=(first.sequence(0),), reward=first.reward.value, metrics=metrics)
        check = await self._check(job, first)
        if check is None:
            metrics["verification_skipped"] = 1.0
            return Outcome(sequences=(first.sequence(0),), reward=first.reward.value, metrics=metrics)
        second = await self._write_again(job, first, check) if check.rejects else None
        last = second or first
        reference = await self._reference(job) if check.read.cases else None
        valid = await self._passes(job, reference, check.read.cases)
        reward = verifier_reward(
            self._settings.verifier_reward,
            final_correct=last.correct,
            first_correct=first.correct,
            rejected=check.rejects,
            valid=valid,
        )
        metrics |= {
            "final_correct": float(last.correct),
            "rejected": float(check.rejects),
            "retry_skipped": float(check.rejects and second is None),
            "solved_by_retry": float(last.correct and not first.correct),
            "broken_by_retry": float(first.correct and not last.correct),
            "reference_missing": float(not job.solutions or (bool(check.read.cases) and reference is None)),
        }
        sequences = [first.sequence(0), check.sequence(reward, valid), *([second.sequence(1)] if second else [])]
        return Outcome(sequences=tuple(sequences), reward=last.reward.value, metrics=metrics)

    def _messages(self, job: _Job) -> list[Message]:
        settings = self._settings
        messages = build_messages(settings, job.task)
        return asking_for_program(messages, job.task, settings.program_prompt, settings.function_prompt)

    async def _write(self, job: _Job, messages: list[Message], max_prompt_tokens: int | None = None) -> _Attempt:
        conversation = Conversation(
            self._coder(job),
            messages,
            job.context.sampling,
            max_prompt_tokens=max_prompt_tokens,
            thinking=self._settings.thinking,
        )
        turn = await conversation.generate()
        answer = after_thoughts(turn.text)
        reward = await self._grade(job.context.gateway, job.task, answer)
        return _Attempt(conversation, turn, program_of(answer), reward)

    async def _write_again(self, job: _Job, first: _Attempt, check: _Check) -> _Attempt | None:
        """The second program; None when its prompt does not fit. No part of the prompt comes from the ground truth."""
        settings = self._settings
        messages = build_messages(settings, job.task)
        told = report(check.read.cases, check.outcomes, max_chars=settings.max_report_chars)
        as_text = self._coder(job).chat.as_text  # a program's output must not end a turn
        prompt = fill(
            settings.retry_prompt,
            problem=str(self._messages(job)[-1]["content"]),
            program=as_text(first.program.strip("\n")),
            report=as_text(told or f"No test case could be run: {check.read.problem}."),
        )
        try:
            return await self._write(job, with_last_text(messages, prompt))
        except PromptTooLongError:
            return None

    async def _check(self, job: _Job, first: _Attempt) -> _Check | None:
        """Test cases for the first program; None when they cannot be asked for."""
        settings = self._settings
        if job.entry_point is None:
            return None
        problem = without_examples(str(build_messages(settings, job.task, bare=True)[-1]["content"]))
        template = settings.function_test_prompt if job.entry_point else settings.program_test_prompt
        verifier = job.context.policy(settings.verifier)
        prompt = fill(
            template,
            problem=problem,
            program=verifier.chat.as_text(first.program.strip("\n") or _NO_PROGRAM),
            num_cases=str(settings.num_cases),
            entry_point=job.entry_point,
        )
        try:
            conversation = Conversation(
                verifier,
                [{"role": "user", "content": prompt}],
                job.context.sampling,
                thinking=settings.verifier_thinking,
            )
        except PromptTooLongError:
            return None
        turn = await conversation.generate()
        read = read_cases(turn.text, is_function=bool(job.entry_point), num_cases=settings.num_cases)
        outcomes = await job.run_on(first.program, read.cases, settings.case_time_s)
        return _Check(conversation, turn, read, outcomes)

    async def _reference(self, job: _Job) -> str | None:
        """The first of the row's solutions that passes every test of the task; None when none does."""
        key = (job.task.task_id, *job.solutions)
        if key not in self._references:
            found = None
            for solution in job.solutions:
                if (await self._grade(job.context.gateway, job.task, solution)).value >= 1.0:
                    found = program_of(solution)
                    break
            if len(self._references) >= _MAX_KNOWN_REFERENCES:
                self._references.clear()
            self._references[key] = found
        return self._references[key]

    async def _passes(self, job: _Job, reference: str | None, cases: Sequence[JudgeCase]) -> bool | None:
        """Whether the reference solution passes the cases, of which there must be one; None without a reference."""
        if not cases:
            return False
        if reference is None:
            return None
        return all(outcome.passed for outcome in await job.run_on(reference, cases, self._settings.case_time_s))

    def _coder(self, job: _Job) -> PolicyClient:
        return job.context.policy(self._settings.policy or "model0")


def _stop(turn: Turn) -> StopReason:
    return StopReason.STOP if turn.ended else StopReason.LENGTH

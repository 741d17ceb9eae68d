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

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.records import Purpose, Task
from services.common.text.programs import fenced_blocks, program_of, with_preamble
from services.common.text.thoughts import after_thoughts
from services.common.text.tools import cut_text
from services.inference.workflows.base import (
    CaseOutcome,
    JudgeCase,
    Outcome,
    ProgramStatus,
    WorkflowContext,
    asking_for_program,
    build_messages,
    entry_point_of,
    fill,
    with_last_text,
)
from services.inference.workflows.single import Dialogue, Workflow, WorkflowSettings, begin_check

# --- Default prompts of ``codegen_verifier`` for coder and verifier.


TEST_PROGRAM = """You test programs. Below are a programming problem without its examples, and a candidate program that \
may be right or wrong. Read the program and look for inputs that it gets wrong: smallest and unusual values, ties, limits, \
what the statement says only once. Keep them small enough to work out the right output by hand, and work it out step by \
step from the statement, never from the program: a test whose output is wrong rejects right programs.

Problem:
{problem}

Candidate program:

```python
{program}
```

After your reasoning write exactly {num_cases} different test cases as one JSON list in a block that begins with ```json \
and ends with ```. "input" is all that the program reads from standard input and "output" all that it must print:

```json
[{"input": "...\\n", "output": "...\\n"}]
```"""
TEST_FUNCTION = """You test programs. Below are a programming problem without its examples, and a candidate program that \
may be right or wrong. Read the program and look for arguments that it gets wrong: smallest and unusual values, ties, \
limits, what the statement says only once. Keep them small enough to work out the right value by hand, and work it out \
step by step from the statement, never from the program: a test whose value is wrong rejects right programs.

Problem:
{problem}

Candidate program:

```python
{program}
```

After your reasoning write exactly {num_cases} different test cases as one JSON list in a block that begins with ```json \
and ends with ```. "args" is the list of positional arguments of `{entry_point}` and "expected" the value that it must \
return:

```json
[{"args": [...], "expected": ...}]
```"""
TRY_AGAIN = """{problem}

An earlier program of yours for this problem was not accepted. A tester wrote test cases, and your program was run on them:

{report}

The tester may be wrong about what is right. Solve the problem again, and write the whole code into one block that begins \
with ```python and ends with ```."""


# --- Parses a verifier's test cases, reports a program's results on them, and computes the verifier's reward.


VerifierReward = Literal["coupled", "own"]
MAX_CASE_BYTES = 1 << 16  # of one case's JSON: longer cases were not worked out by hand
_LISTS = ("cases", "tests", "test_cases")
_TEXT_GIVEN, _TEXT_EXPECTED = ("input", "stdin"), ("output", "expected_output", "expected", "stdout")
_CALL_GIVEN, _CALL_EXPECTED = ("args", "arguments", "input"), ("expected", "expected_output", "output", "return")
_MISSING = object()
_WHAT_HAPPENED = {
    ProgramStatus.RUNTIME_ERROR: "ended with an error",
    ProgramStatus.COMPILE_ERROR: "is no valid Python",
    ProgramStatus.TIME_LIMIT: "was stopped: it took too long",
    ProgramStatus.MEMORY_LIMIT: "was stopped: it used too much memory",
    ProgramStatus.OUTPUT_LIMIT: "was stopped: it wrote too much",
    ProgramStatus.INVALID_REQUEST: "could not be run on this case",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCases:
    """The parsed cases. ``num_left_out``: malformed, repeated, beyond the requested number, or too few to count."""

    cases: tuple[JudgeCase, ...] = ()
    num_left_out: int = 0
    problem: str = ""  # why there are no cases


def read_cases(text: str, *, is_function: bool, num_cases: int) -> GeneratedCases:
    """The ``num_cases`` cases in a verifier's text, or none, by the rules above."""
    written = next((found for block in reversed(fenced_blocks(after_thoughts(text))) if (found := _listed(block))), [])
    cases: list[JudgeCase] = []
    for item in written:
        case = _case(item, is_function)
        # As JSON: in Python True equals 1, and a case of the one is no repetition of a case of the other.
        if case is not None and len(cases) < num_cases and all(_text(case) != _text(other) for other in cases):
            cases.append(case)
    if not written:
        return GeneratedCases(problem="there is no JSON list of test cases in the tester's answer")
    if len(cases) < num_cases:
        problem = f"{len(cases)} of {len(written)} test cases can be used, and {num_cases} were asked for"
        return GeneratedCases(num_left_out=len(written), problem=problem)
    return GeneratedCases(cases=tuple(cases), num_left_out=len(written) - len(cases))


def needs_retry(outcomes: Sequence[CaseOutcome]) -> bool:
    """Whether the program is not accepted: a generated case failed, or there is no valid case."""
    return not outcomes or not all(outcome.passed for outcome in outcomes)


def report(cases: Sequence[JudgeCase], outcomes: Sequence[CaseOutcome], *, max_chars: int) -> str:
    """All cases with the program's results; each text is cut to ``max_chars`` in its middle."""
    return "\n\n".join(
        f"Case {number}\n{_described(case, outcome, max_chars)}"
        for number, (case, outcome) in enumerate(zip(cases, outcomes, strict=True), start=1)
    )


def verifier_reward(
    kind: VerifierReward, *, final_correct: bool, first_correct: bool, rejected: bool, valid: bool | None
) -> float:
    """The reward of the author of the cases.

    coupled   [the last program is right] + [a reference solution passes the cases]: 0, 1 or 2
    own       0.5 * (valid + discriminates): 0, 0.5 or 1. ``discriminates``: valid, and the cases agree with the ground
              truth about the first program

    ``rejected`` says that the first program was not accepted. ``valid`` says that the reference solution passed all cases;
    False when there are no cases, None when the task has no reference solution. Then validity earns no reward, and ``own``
    gives its other half for the agreement alone.
    """
    if kind == "coupled":
        return float(final_correct) + float(valid is True)
    agrees = rejected != first_correct
    return 0.5 * (float(valid is True) + float(valid is not False and agrees))


def _listed(block: str) -> list[Any]:
    try:
        found = json.loads(block, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return []
    if isinstance(found, Mapping):
        inner = next((found[name] for name in _LISTS if isinstance(found.get(name), list)), None)
        return inner if inner is not None else [found]
    return found if isinstance(found, list) else []


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _case(item: Any, is_function: bool) -> JudgeCase | None:
    if not isinstance(item, Mapping):
        return None
    try:
        if len(json.dumps(item, ensure_ascii=False).encode()) > MAX_CASE_BYTES:
            return None
    except UnicodeEncodeError:  # a lone surrogate, written as an escape, is no text that a program could read
        return None
    if is_function:
        given, expected = _first(item, _CALL_GIVEN), _first(item, _CALL_EXPECTED)
        return (
            JudgeCase(given=given, expected=expected) if isinstance(given, list) and expected is not _MISSING else None
        )
    texts = [_lines(_first(item, names)) for names in (_TEXT_GIVEN, _TEXT_EXPECTED)]
    return None if None in texts else JudgeCase(given=texts[0], expected=texts[1])


def _first(item: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), _MISSING)


def _lines(value: Any) -> str | None:
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def _text(case: JudgeCase) -> str:
    return json.dumps([case.given, case.expected])


def _described(case: JudgeCase, outcome: CaseOutcome, max_chars: int) -> str:
    def shown(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return cut_text(text.strip("\n"), max_chars)

    is_function = not isinstance(case.given, str)
    lines = [
        f"{'arguments' if is_function else 'input'}:\n{shown(case.given)}",
        f"expected:\n{shown(case.expected)}",
    ]
    if outcome.passed:
        lines.append("your program passed")
    elif outcome.verdict is ProgramStatus.WRONG_ANSWER and not is_function:
        lines.append(f"your program printed:\n{shown(outcome.stdout) or '(nothing)'}")
    else:
        happened = _WHAT_HAPPENED.get(outcome.verdict, "gave another answer")
        said = shown(
            outcome.stderr if outcome.verdict is ProgramStatus.RUNTIME_ERROR and outcome.stderr else outcome.detail
        )
        lines.append(f"your program {happened}{f':{chr(10)}{said}' if said else ''}")
    return "\n".join(lines)


# --- Removes the examples from the text of a programming problem, for policies that write test cases.


_DECORATION = string.whitespace + "\xa0*_=-~|"
_NUMBER = r"(?:\s*+(?:no\.?+\s*+)?+#?+\s*+\d++)?+"
_EXAMPLE = re.compile(
    rf"(?:(?:sample|example)s?{_NUMBER}(?:\s++(?:tests?|test\s++cases?|cases?|inputs?|outputs?|io|and|&|/)){{0,4}}{_NUMBER}"
    r"|examples?\s+of\s+(?:input|output).*|demo|(?:inputs?|outputs?)\s+(?:sample|example)s?"
    rf"{_NUMBER})",
    re.IGNORECASE,
)
_WHOLE_PROBLEM = (
    "constraint", "constraints", "input format", "output format", "input specification", "output specification",
    "function signature", "tag", "tags", "time limit", "memory limit", "limits", "restrictions", "subtask", "subtasks",
    "scoring", "follow up", "follow-up", "your task", "starter code",
)  # fmt: skip
_DOCTEST = ">>>"
_PYTHON = "```python"
_DOCSTRING = ('"""', "'''")


def without_examples(problem: str) -> str:
    """The problem without its examples; unchanged if no text would be left.

    >>> without_examples("Add two numbers.\\n\\nExample 1:\\nInput: 1 2\\nOutput: 3\\n\\nConstraints:\\nBoth fit a byte.")
    'Add two numbers.\\n\\nConstraints:\\nBoth fit a byte.'
    """
    lines = problem.split("\n")
    kept: list[str] = []
    in_example = in_doctest = False
    for line in lines:
        ends_docstring = any(quotes in line for quotes in _DOCSTRING)
        if in_doctest and (ends_docstring or not line.strip()):
            in_doctest = False
        if _EXAMPLE.fullmatch(_heading(line)):
            in_example = True
        elif ends_docstring or _heading(line).lower() in _WHOLE_PROBLEM or line.startswith(_PYTHON):
            in_example = False
        if line.lstrip().startswith(_DOCTEST):
            in_doctest = True
        if not in_example and not in_doctest:
            kept.append(line)
    if len(kept) == len(lines) or not any(line.strip() for line in kept):
        return problem
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def _heading(line: str) -> str:
    """The line up to a colon, without rules, marks and spaces around it; a sentence is no heading."""
    return _undecorated(_undecorated(line).partition(":")[0])


def _undecorated(text: str) -> str:
    return text.lstrip(_DECORATION + ">#").rstrip(_DECORATION)


class CodegenVerifierSettings(WorkflowSettings):
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


_MOST_REFERENCES = 4096  # tasks whose reference solution is remembered
_MOST_REPORT_CHARS = 1000  # of each input and output in the report to the coder; longer ones are cut in the middle
_NO_PROGRAM = "there is no program in the answer"


class CodegenVerifier(Workflow):
    Settings: ClassVar[type[WorkflowSettings]] = CodegenVerifierSettings

    def __init__(self, settings: CodegenVerifierSettings) -> None:
        super().__init__(settings)
        # By task and solutions: the rollouts of a task group have the same reference.
        self._references: dict[tuple[str, ...], str | None] = {}

    def policies(self) -> tuple[str, ...]:
        return ()  # not known before the purpose: the coder may play an evaluation alone

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        """Plays one rollout: a program, in training the test cases for it, after a failure a second program."""
        settings = self.settings
        coder: dict[str, Any] = {"policy": settings.policy or "model0", "role": "coder"}
        asked = asking_for_program(build_messages(settings, task), task)
        first = self.converse(task, context, **coder, messages=asked)
        program, first_reward = await self._write(first)
        sequences = [first.sequence(first_reward)]
        metrics = {"first_correct": float(first_reward >= 1.0)}
        if context.purpose is Purpose.EVALUATION and settings.evaluate == "coder":
            return Outcome(sequences=tuple(sequences), reward=first_reward, metrics=metrics)
        tests = task.data.get("tests")
        tests = tests if isinstance(tests, Mapping) else {}
        entry_point = entry_point_of(tests)
        check = None if entry_point is None else self._begin_check(task, context, program, entry_point)
        if check is None or entry_point is None:
            metrics["verification_skipped"] = 1.0
            return Outcome(sequences=tuple(sequences), reward=first_reward, metrics=metrics)
        read = read_cases(await check.respond(), is_function=bool(entry_point), num_cases=settings.num_cases)

        async def run_on_cases(program: str) -> Sequence[CaseOutcome]:
            if not read.cases or not program.strip():
                nothing = CaseOutcome(verdict=ProgramStatus.INVALID_REQUEST, detail=_NO_PROGRAM)
                return (nothing,) * len(read.cases)
            code = with_preamble(program, str(tests.get("preamble") or ""), entry_point)
            time_s = settings.case_time_s
            return await context.gateway.judge(code, read.cases, entry_point=entry_point, case_time_s=time_s)

        outcomes = await run_on_cases(program)
        rejected = needs_retry(outcomes)
        second, reward = None, first_reward
        if rejected:
            # No part of the prompt comes from the ground truth, and a program's output must not end a turn.
            told = report(read.cases, outcomes, max_chars=_MOST_REPORT_CHARS)
            told = context.policy(coder["policy"]).chat.as_text(told or f"No test case could be run: {read.problem}.")
            prompt = fill(TRY_AGAIN, problem=str(asked[-1]["content"]), report=told)
            messages = with_last_text(build_messages(settings, task), prompt)
            second = self.converse_if_it_fits(task, context, **coder, attempt=1, messages=messages)
            if second is not None:
                _, reward = await self._write(second)
        solutions = _solutions_of(task)
        reference = await self._reference(task, context, solutions) if read.cases else None
        valid: bool | None = False  # without cases; None without a reference
        if read.cases:
            valid = None if reference is None else not needs_retry(await run_on_cases(reference))
        earned = verifier_reward(
            settings.verifier_reward,
            final_correct=reward >= 1.0,
            first_correct=first_reward >= 1.0,
            rejected=rejected,
            valid=valid,
        )
        sequences.append(
            check.sequence(
                earned,
                cases=float(len(read.cases)),
                cases_left_out=float(read.num_left_out),
                cases_unparsed=float(not read.cases),
                cases_failed=float(sum(not outcome.passed for outcome in outcomes)),
                cases_valid=float(valid is True),
            )
        )
        if second is not None:
            sequences.append(second.sequence(reward))
        metrics |= {
            "final_correct": float(reward >= 1.0),
            "rejected": float(rejected),
            "retry_skipped": float(rejected and second is None),
            "solved_by_retry": float(reward >= 1.0 > first_reward),
            "broken_by_retry": float(first_reward >= 1.0 > reward),
            "reference_missing": float(not solutions or (bool(read.cases) and reference is None)),
        }
        return Outcome(sequences=tuple(sequences), reward=reward, metrics=metrics)

    async def _write(self, chat: Dialogue) -> tuple[str, float]:
        """Let the coder write a program; returns it, and its reward by the ground truth."""
        answer = after_thoughts(await chat.respond())
        return program_of(answer), await chat.grade(answer)

    def _begin_check(self, task: Task, context: WorkflowContext, program: str, entry_point: str) -> Dialogue | None:
        """The conversation that asks for test cases; None where its prompt does not fit."""
        settings = self.settings
        as_text = context.policy(settings.verifier).chat.as_text
        prompt = fill(
            TEST_FUNCTION if entry_point else TEST_PROGRAM,
            problem=without_examples(str(build_messages(settings, task, bare=True)[-1]["content"])),
            program=as_text(program.strip("\n") or f"({_NO_PROGRAM})"),
            num_cases=str(settings.num_cases),
            entry_point=entry_point,
        )
        return begin_check(self, task, context, prompt)

    async def _reference(self, task: Task, context: WorkflowContext, solutions: tuple[str, ...]) -> str | None:
        """The first of the row's solutions that passes every test of the task; None when none does."""
        key = (task.task_id, *solutions)
        if key not in self._references:
            found = None
            for solution in solutions:
                if (await self.grader(context.gateway, task, solution)).value >= 1.0:
                    found = program_of(solution)
                    break
            if len(self._references) >= _MOST_REFERENCES:
                self._references.clear()
            self._references[key] = found
        return self._references[key]


def _solutions_of(task: Task) -> tuple[str, ...]:
    """The solutions of a row, unchanged."""
    written = task.data.get("solutions") or [task.data.get("solution")]
    return tuple(text for text in written if isinstance(text, str) and text.strip())

"""Parses a verifier's test cases, reports a program's results on them, and computes the verifier's reward.

Rules of parsing:

1. Thinking is left out; after an unfinished thought no text is left.
2. The last fenced block that holds a JSON list or object counts. An object is one case, or has the list under ``cases``,
   ``tests`` or ``test_cases``.
3. A case of a program has text ``input`` and ``output``; of a function a list ``args`` and a value ``expected``. A few other
   names for these are understood, and a list of lines for a text. Any other form is a malformed case: left out, counted.
4. A case that repeats an earlier one is left out; of the rest the first ``num_cases`` count. When fewer are left, none
   counts, and ``problem`` has the reason.

Pure functions: no policy, no gateway. The decision to try again depends on the cases alone; the ground truth is no argument
of the deciding functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.common.text.programs import fenced_blocks
from services.common.text.thoughts import after_thoughts
from services.common.text.tool_calls import cut_text
from services.inference.workflows.base import CaseOutcome, JudgeCase, ProgramStatus

VerifierReward = Literal["coupled", "own"]

MAX_CASE_BYTES = 1 << 16  # of one case's JSON: longer cases were not worked out by hand
_LISTS = ("cases", "tests", "test_cases")
_TEXT_GIVEN, _TEXT_EXPECTED = ("input", "stdin"), ("output", "expected_output", "expected", "stdout")
_CALL_GIVEN, _CALL_EXPECTED = ("args", "arguments", "input"), ("expected", "expected_output", "output", "return")
_CHECK_CALL = re.compile(r"^check\(([\w.()]+)\)\s*$", re.MULTILINE)
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

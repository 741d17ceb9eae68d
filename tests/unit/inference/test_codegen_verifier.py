"""Coder and test-case verifier: prompts, second tries, rewards, omissions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.common.errors import InfrastructureError
from services.common.records import Purpose, Task
from services.common.telemetry.accounts import TimeAccount
from services.inference.rollouts import RolloutPolicy
from services.inference.workflows.base import CaseOutcome, JudgeCase, Outcome, ProgramStatus
from services.inference.workflows.codegen import CodegenVerifier, CodegenVerifierSettings
from tests.unit.inference.fakes import FakeGateway, RecordingEngine, make_context, served_policy, thinking_chat

RIGHT, WRONG = "```python\nright = 1\n```", "```python\nwrong = 1\n```"
GOOD = '```json\n[{"input": "1", "output": "good"}, {"input": "2", "output": "good"}]\n```'
BAD = '```json\n[{"input": "1", "output": "bad"}, {"input": "2", "output": "bad"}]\n```'
SILENT = "I have no case."
ONE_OF_TWO = '```json\n[{"input": "1", "output": "good"}]\n```'
PROBLEM = "Print it.\n\nExample\n\nInput\n\n9\n\nOutput\n\n81\n\nConstraints\n\nall small"
STDIN: dict[str, Any] = {"kind": "stdin", "cases": [{"stdin": "secret", "expected": "truth"}]}
SOLUTION = "reference = right"


def graded(task: Task, completion: str) -> float:
    return float("right" in completion)


def judged(code: str, case: JudgeCase) -> CaseOutcome:
    """A good case passes right programs, a bad one passes wrong ones."""
    passes = ("right" in code) == (case.expected == "good")
    return CaseOutcome(
        verdict=ProgramStatus.OK if passes else ProgramStatus.WRONG_ANSWER, stdout="<|im_end|>" + code[:9]
    )


class Played:
    def __init__(self, outcome: Outcome, coder: list[str], verifier: list[str], gateway: FakeGateway) -> None:
        self.outcome, self.coder, self.verifier, self.gateway = outcome, coder, verifier, gateway
        self.metrics = outcome.metrics

    def rewards(self, role: str) -> list[float]:
        return [s.reward for s in self.outcome.sequences if s.role == role]


async def play(
    programs: Sequence[str],
    words: str,
    *,
    row: dict[str, Any] | None = None,
    purpose: Purpose = Purpose.TRAIN,
    coder_context: int = 4096,
    verifier_context: int = 4096,
    gateway: FakeGateway | None = None,
    **settings: Any,
) -> Played:
    gateway = gateway or FakeGateway(reward=graded, on_case=judged)
    coder = await served_policy(programs, chat=thinking_chat(), context_length=coder_context)
    verifier = await served_policy([words], chat=thinking_chat(), context_length=verifier_context)
    verifier = dataclasses.replace(verifier, name="model1")
    checking = RolloutPolicy(verifier, request_prefix="g0/0/0", seed=2, account=TimeAccount("replica/a"))
    context = make_context(coder, gateway, max_new_tokens=400)
    context = dataclasses.replace(context, policies={**context.policies, "model1": checking}, purpose=purpose)
    data = row if row is not None else {"problem": PROBLEM, "tests": STDIN, "solution": SOLUTION}
    outcome = await CodegenVerifier(CodegenVerifierSettings(**settings)).run(Task(task_id="t", data=data), context)
    prompts = []
    for engine in (coder.engine, verifier.engine):
        assert isinstance(engine, RecordingEngine)
        prompts.append([thinking_chat().decode(list(request.prompt_ids)) for request in engine.requests])
    return Played(outcome, prompts[0], prompts[1], gateway)


@pytest.mark.parametrize(
    ("programs", "words", "coder", "coupled", "own"),
    [
        ([RIGHT], GOOD, [1.0], 2.0, 1.0),
        ([RIGHT, RIGHT], BAD, [1.0, 1.0], 1.0, 0.0),
        ([RIGHT, WRONG], BAD, [1.0, 0.0], 0.0, 0.0),
        ([WRONG, RIGHT], GOOD, [0.0, 1.0], 2.0, 1.0),
        ([WRONG, WRONG], GOOD, [0.0, 0.0], 1.0, 1.0),
        ([WRONG], BAD, [0.0], 0.0, 0.0),
        ([RIGHT, RIGHT], SILENT, [1.0, 1.0], 1.0, 0.0),
        ([WRONG, RIGHT], SILENT, [0.0, 1.0], 1.0, 0.0),
        ([RIGHT, WRONG], SILENT, [1.0, 0.0], 0.0, 0.0),
        ([WRONG, RIGHT], ONE_OF_TWO, [0.0, 1.0], 1.0, 0.0),
    ],
)
async def test_credit(programs: list[str], words: str, coder: list[float], coupled: float, own: float) -> None:
    for kind, reward in (("coupled", coupled), ("own", own)):
        played = await play(programs, words, verifier_reward=kind)
        assert played.rewards("coder") == coder and played.rewards("verifier") == [reward]
        assert played.outcome.reward == coder[-1]
        assert [(s.policy, s.role, s.attempt) for s in played.outcome.sequences] == [
            ("model0", "coder", 0), ("model1", "verifier", 0), ("model0", "coder", 1),
        ][: 1 + len(coder)]  # fmt: skip
        assert played.metrics["solved_by_retry"] == float(coder == [0.0, 1.0])
        assert played.metrics["broken_by_retry"] == float(coder == [1.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "words", "reward"), [("coupled", GOOD, 1.0), ("own", GOOD, 0.5), ("own", SILENT, 0.0)]
)
async def test_without_a_reference_solution_nothing_is_earned_for_validity(
    kind: str, words: str, reward: float
) -> None:
    programs = [RIGHT, RIGHT] if words == SILENT else [RIGHT]
    played = await play(programs, words, row={"problem": PROBLEM, "tests": STDIN}, verifier_reward=kind)
    assert played.rewards("verifier") == [reward] and played.metrics["reference_missing"] == 1.0
    assert all("reference" not in code for code, _, _ in played.gateway.judged)


@pytest.mark.parametrize(
    ("solutions", "used"),
    [
        (["a = 0", "reference = right", "other = right"], "reference = right"),
        (["```python\nreference = right\n```"], "reference = right"),
        (["a = 0", "b = 0"], None),
    ],
)
async def test_the_reference_is_the_first_solution_that_passes_every_test(
    solutions: list[str], used: str | None
) -> None:
    played = await play([RIGHT], GOOD, row={"problem": PROBLEM, "tests": STDIN, "solutions": solutions})
    on_cases = [code for code, _, _ in played.gateway.judged if "wrong" not in code][1:]
    assert on_cases == ([] if used is None else [used])
    assert played.metrics["reference_missing"] == float(used is None)
    assert played.rewards("verifier") == [1.0 if used is None else 2.0]


async def test_the_verifier_reads_the_program_and_the_problem_without_examples() -> None:
    played = await play([WRONG, RIGHT], GOOD)
    (prompt,) = played.verifier
    assert "Print it." in prompt and "all small" in prompt and "exactly 2 different test cases" in prompt
    assert "```python\nwrong = 1\n```" in prompt and "81" not in prompt
    assert "81" in played.coder[0], "the coder sees the examples"


async def test_the_second_prompt_has_all_cases_and_no_program_and_ends_no_turn() -> None:
    mixed = GOOD.replace('"2", "output": "good"', '"2", "output": "bad"')
    played = await play([WRONG, RIGHT], mixed)
    first, second = played.coder
    assert "Case 1\ninput:\n1\nexpected:\ngood" in second
    assert "Case 2\ninput:\n2\nexpected:\nbad\nyour program passed" in second
    assert "```python\nwrong" not in second
    assert second.count("<|im_end|>") == first.count("<|im_end|>"), "the program's output is text"
    assert second.count("ends with ```.") == 2, "the task's prompt is unchanged"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (SILENT, "there is no JSON list of test cases"),
        (ONE_OF_TWO, "1 of 1 test cases can be used, and 2 were asked for"),
    ],
)
async def test_missing_cases_lead_to_a_second_try_that_says_why(words: str, told: str) -> None:
    played = await play([WRONG, RIGHT], words)
    assert told in played.coder[1] and played.metrics["rejected"] == 1.0
    assert played.gateway.judged == []


async def test_the_retry_does_not_depend_on_the_ground_truth() -> None:
    """The ground truth has no influence on the requests to policies and programs."""
    seen = []  # the ground truth chooses the reference: its runs are left out
    for truth in (0.0, 1.0):
        gateway = FakeGateway(reward=lambda task, completion, truth=truth: truth, on_case=judged)
        played = await play([WRONG, RIGHT], GOOD, gateway=gateway)
        of_the_coder = [run for run in gateway.judged if "reference" not in run[0]]
        seen.append((played.coder, played.verifier, of_the_coder))
        assert all("secret" not in prompt and "truth" not in prompt for prompt in played.coder + played.verifier)
    assert seen[0] == seen[1]


async def test_a_function_is_called_with_generated_arguments() -> None:
    row = {
        "problem": "Add.", "solution": "```python\ndef add(a, b): right\n```",
        "tests": {"kind": "call", "entry_point": "add", "cases": [{"args": [1, 2], "expected": 3}]},
    }  # fmt: skip
    words = '```json\n[{"args": [1, 1], "expected": "good"}]\n```'
    played = await play([RIGHT], words, row=row, num_cases=1)
    assert [(cases, entry) for _, cases, entry in played.gateway.judged] == [
        ((JudgeCase(given=[1, 1], expected="good"),), "add")
    ] * 2
    assert "`add`" in played.coder[0] and "`add`" in played.verifier[0]


async def test_a_completion_of_a_prompt_is_run_behind_it() -> None:
    tests = {"kind": "assert", "entry_point": "add", "preamble": "def add(a, b):\n", "tests": "assert add(1, 2) == 3"}
    row = {"problem": "def add(a, b):", "solution": "def add(a, b): right", "tests": tests}
    words = '```json\n[{"args": [1, 1], "expected": "good"}]\n```'
    played = await play(["    return right"], words, row=row, num_cases=1)
    assert played.gateway.judged[0][0] == "def add(a, b):\n    return right"


async def test_an_answer_without_a_program_fails_every_case_and_is_not_run() -> None:
    played = await play(["<think>forever", RIGHT], GOOD)
    assert played.rewards("coder") == [0.0, 1.0]
    assert "there is no program in the answer" in played.coder[1]
    assert "(there is no program in the answer)" in played.verifier[0]
    assert [code.split()[0] for code, _, _ in played.gateway.judged] == ["reference"]


async def test_a_task_that_does_not_say_how_it_is_called_is_only_solved() -> None:
    row = {"problem": "Add.", "tests": {"kind": "assert", "tests": "assert add(1, 2) == 3", "entry_point": ""}}
    played = await play([RIGHT], GOOD, row=row)
    assert [s.role for s in played.outcome.sequences] == ["coder"] and not played.verifier
    assert played.metrics["verification_skipped"] == 1.0 and "Add." in played.coder[0]


async def test_what_does_not_fit_the_context_is_left_out() -> None:
    played = await play([RIGHT], GOOD, verifier_context=60)
    assert [s.role for s in played.outcome.sequences] == ["coder"]
    assert played.metrics["verification_skipped"] == 1.0
    long = GOOD.replace('"1"', json.dumps("1 2 " * 40))
    played = await play([WRONG], long, coder_context=700)
    assert [s.role for s in played.outcome.sequences] == ["coder", "verifier"]
    assert played.metrics["retry_skipped"] == 1.0 and played.rewards("verifier") == [1.0]


@pytest.mark.parametrize(("evaluate", "roles"), [("coder", ["coder"]), ("all", ["coder", "verifier", "coder"])])
async def test_an_evaluation_plays_the_coder_alone_unless_asked(evaluate: str, roles: list[str]) -> None:
    played = await play([WRONG, RIGHT], GOOD, purpose=Purpose.EVALUATION, evaluate=evaluate)
    assert [s.role for s in played.outcome.sequences] == roles
    assert played.outcome.reward == float(evaluate == "all")


@pytest.mark.parametrize("num_answers", [0, 1, 2, 3])
async def test_machinery_that_fails_is_never_a_reward(num_answers: int) -> None:
    """The grader of the first program, the judge of the cases, the grader of the reference, its judge on the cases."""
    gateway = FakeGateway(reward=graded, on_case=judged)
    answers = iter([None] * num_answers)

    def fail() -> None:
        try:
            next(answers)
        except StopIteration:
            raise InfrastructureError("broken") from None

    gateway._maybe_fail = fail  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError):
        await play([RIGHT], GOOD, gateway=gateway)

"""The check at the start finds rows that a recipe's workflow or reward cannot use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from extras.hub.settings import HarborConfig
from services.common.config.data import DatasetConfig, WorkflowConfig
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.recipe import Recipe
from services.orchestrator.tasks.datasets import open_source, requirement

MESSAGES = [{"role": "user", "content": "q"}]
TESTS = {"kind": "stdin", "cases": [{"stdin": "1", "expected": "1"}]}


def recipe(workflow: dict[str, Any], evaluation: dict[str, Any] | None = None) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "required",
            "policies": {"model0": {"model": {"path": "none"}}},
            "data": {"train": {"path": "unused"}, "evaluation": {"held_out": {"path": "unused"}}},
            "workflow": workflow,
            "evaluation": {"workflow": evaluation},
        }
    )


def left_out(path: Path, needed: Recipe, section: str = "data.train") -> list[str]:
    return open_source(DatasetConfig(path=str(path)), 0, requirement(needed, section)).left_out.reasons


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    made = [
        {"messages": MESSAGES, "answer": 1, "tests": TESTS, "other": "q"},
        {"text": "q", "answer": 1, "tests": TESTS, "other": "q"},
        {"problem": ["q"], "answer": 1, "tests": TESTS, "other": "q"},
        {"problem": "q", "reward_model": {"ground_truth": None}, "tests": TESTS, "other": "q"},
        {"problem": "q", "answer": 1, "tests": [{"input": "1", "output": "1"}]},
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in made))
    return path


def test_a_workflow_that_reads_a_prompt_needs_one(rows: Path) -> None:
    prompt, kind = left_out(rows, recipe({"name": "single_turn", "settings": {"reward": "own:function"}}))
    assert prompt.startswith("row 2 has no prompt: looked for messages, prompt, problem, question in")
    assert kind == "row 3: problem is neither text nor a list of messages"
    own = {"prompt_field": "other", "reward": "own:function"}
    (other,) = left_out(rows, recipe({"name": "tool_use", "settings": own}))
    assert other.startswith("row 5 has no prompt: looked for other in")


def test_the_rewards_math_and_code_need_an_answer_and_tests(rows: Path) -> None:
    math = left_out(rows, recipe({"name": "single_turn", "settings": {"reward": "math"}}))
    assert math[2].startswith("row 4 has no answer")
    code = left_out(rows, recipe({"name": "single_turn", "settings": {"reward": "code"}}))
    assert code[2].startswith("row 5 has no tests with a kind of stdin, call, assert")


UNUSABLE = {
    "no Python": {"tests": "assert candidate(3 == 21", "entry_point": "f"},
    "use nowhere": {"tests": "assert nowhere(candidate(3))", "entry_point": "f"},
    "have no assert": {"tests": "print(candidate(3))", "entry_point": "f"},
    "import pytest": {"tests": "import pytest\nassert candidate(3)", "entry_point": "f"},
    "use decode and encode": {"tests": "assert decode(encode(3)) == 3"},
    "must be text": {"tests": 3},
    "no cases": {"kind": "call", "entry_point": "f", "cases": []},
}


def test_rows_whose_tests_can_judge_no_program_are_left_out_with_their_fault(tmp_path: Path) -> None:
    fine = {"tests": "def check(fn): assert fn(3) == 21", "entry_point": "f"}
    with_names = {"tests": "assert encode(3) == 4\nassert decode(4) == 3", "names": ["encode", "decode"]}
    path = tmp_path / "rows.jsonl"
    tests = [fine, with_names, *UNUSABLE.values()]
    path.write_bytes(
        b"".join(orjson.dumps({"problem": "q", "tests": {"kind": "assert"} | one}) + b"\n" for one in tests)
    )
    code = recipe({"name": "single_turn", "settings": {"reward": "code"}})
    source = open_source(DatasetConfig(path=str(path)), 0, requirement(code, "data.train"))
    assert len(source) == 2 and source.left_out.count == len(UNUSABLE)
    for number, told, why in zip((3, 4, 5), source.left_out.reasons, UNUSABLE, strict=False):
        assert told.startswith(f"row {number}") and why in told


def test_a_harbor_task_whose_programs_are_not_here_is_left_out_unless_the_recipe_says_that_they_are(
    tmp_path: Path,
) -> None:
    for name, line in (("plain", ""), ("with-run", "RUN apt-get install -y jq")):
        for part in ("environment", "tests"):
            (tmp_path / name / part).mkdir(parents=True)
        for part, text in (
            ("task.toml", ""),
            ("instruction.md", "do"),
            ("tests/test.sh", ""),
            ("environment/Dockerfile", f"FROM a\n{line}"),
        ):
            (tmp_path / name / part).write_text(text)
    needed = recipe({"name": "agent_env", "settings": {"environment": "harbor"}})
    config = DatasetConfig(harbor=str(tmp_path))
    source = open_source(config, 0, requirement(needed, "data.train"))
    assert [source[row].task_id for row in range(len(source))] == ["plain"]
    (reason,) = source.left_out.reasons
    assert reason.startswith("task with-run: Dockerfile line 2: RUN apt-get install -y jq: ")
    assert reason.endswith("envgateway.harbor.skip_run: true")
    here = needed.model_copy(update={"envgateway": EnvGatewayConfig(harbor=HarborConfig(skip_run=True))})
    assert len(open_source(config, 0, requirement(here, "data.train"))) == 2


OPAQUE = {"kind": "assert", "tests": "assert candidate(3) > 1", "entry_point": "f"}


@pytest.mark.parametrize(
    "row", [{"tests": OPAQUE}, {"tests": OPAQUE, "environment": {"name": "tool", "reward": "code"}}]
)
def test_training_leaves_out_rows_with_opaque_tests_and_evaluation_does_not(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    usable = {"problem": "q", "tests": {**OPAQUE, "tests": "assert candidate(3) == 1"}}
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in (usable, {"problem": "q", **row})))
    by_environment = "environment" in row
    workflow = (
        {"name": "agent_env", "settings": {"environment": "tool"}}
        if by_environment
        else {"name": "single_turn", "settings": {"reward": "code"}}
    )
    needed = recipe(workflow)
    (reason,) = left_out(path, needed)
    assert reason.startswith("row 2: its test code cannot be read") and "data.train.opaque_tests: together" in reason
    assert left_out(path, needed, "data.evaluation.held_out") == []
    together = needed.model_copy(
        update={"data": needed.data.model_copy(update={"train": DatasetConfig(path="unused", opaque_tests="together")})}
    )
    assert left_out(path, together) == []


@pytest.mark.parametrize("name", ["single_turn", "tool_use", "actor_verifier", "external_agent", "own.module:Flow"])
def test_a_reward_of_the_gateway_needs_its_fields_in_any_workflow(rows: Path, name: str) -> None:
    by_name = left_out(rows, recipe({"name": name, "settings": {"reward": "math"}}))
    assert any(reason.startswith("row 4 has no answer") for reason in by_name)
    by_default = left_out(rows, recipe({"name": name}))
    assert any("no answer" in reason for reason in by_default) == (WorkflowConfig(name=name).reward is not None)

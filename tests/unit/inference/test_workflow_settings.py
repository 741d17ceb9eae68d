"""Workflows, prompts and rewards from a recipe: built objects, refusals and their messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import WorkflowConfig
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError, DatasetError
from services.common.records import StopReason, Task
from services.inference.workflows.base import Outcome, PromptSettings, boxed_integer, build_messages
from services.inference.workflows.registry import WORKFLOWS, build_workflow, build_workflows
from services.inference.workflows.single import SingleTurn, SingleTurnSettings
from tests.documented import blocks
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, served_policy


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_built_in_workflow_is_built_from_its_defaults(name: str) -> None:
    assert hasattr(build_workflow(WorkflowConfig(name=name)), "run")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "tool_user",
            {},
            "write one of actor_verifier, agent_env, codegen_verifier, external_agent, single_turn, tool_",
        ),
        ("no.such.module:Workflow", {}, "no module"),
        ("services.inference.workflows.tools:PythonWithStandardIo", {}, "is no workflow"),
        ("tool_use", {"max_turn": 3}, r"workflow\.settings\.max_turn: unknown key; did you mean 'max_turns'"),
        ("tool_use", {"max_turns": 0}, r"workflow\.settings\.max_turns"),
        ("tool_use", {"format": "xml"}, r"workflow\.settings\.format"),
        ("single_turn", {"reward": "tests.unit.inference.test_workflow_settings:missing"}, "has no 'missing'"),
    ],
)
def test_a_wrong_workflow_is_refused_with_its_path_and_what_to_write(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_workflow(WorkflowConfig(name=name, settings=settings))


@pytest.mark.parametrize(
    ("data", "settings", "expected"),
    [
        ({"question": "q"}, {}, [("user", "q")]),
        ({"problem": "p", "question": "q"}, {"prompt_field": "question"}, [("user", "q")]),
        ({"question": "q"}, {"system": "s", "instruction": " now"}, [("system", "s"), ("user", "q now")]),
        ({"messages": [{"role": "user", "content": "m"}], "question": "q"}, {}, [("user", "m")]),
        (
            {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "m"}]},
            {"system": "s", "instruction": "!"},
            [("system", "own"), ("user", "m!")],
        ),
        ({"question": "25 + 60?"}, {"instruction": "Number only."}, [("user", "25 + 60?\n\nNumber only.")]),
        ({"question": "q "}, {"instruction": "Number only."}, [("user", "q Number only.")]),
        ({"question": "q"}, {"instruction": "\nNumber only."}, [("user", "q\nNumber only.")]),
        ({"question": "q"}, {"instruction": "\\boxed{}"}, [("user", "q\n\n\\boxed{}")]),
    ],
)
def test_a_row_becomes_messages(
    data: dict[str, Any], settings: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    messages = build_messages(PromptSettings(**settings), Task(task_id="t", data=data))
    assert [(m["role"], m["content"]) for m in messages] == expected


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"problem": "p", "starter_code": "def f(a):\n"}, "p\n\nStarter code:\n\n```python\ndef f(a):\n``` Go."),
        ({"problem": "p, in def f(a): please", "starter_code": "def f(a):"}, "p, in def f(a): please Go."),
        ({"problem": "p", "starter_code": " "}, "p Go."),
        ({"problem": "p", "starter_code": None}, "p Go."),
    ],
)
def test_starter_code_is_shown_once(data: dict[str, Any], text: str) -> None:
    (message,) = build_messages(PromptSettings(instruction=" Go."), Task(task_id="t", data=data))
    assert message["content"] == text


@pytest.mark.parametrize("data", [{}, {"answer": "4"}, {"question": 5}, {"messages": []}, {"messages": ["hi"]}])
def test_a_row_without_a_prompt_is_named(data: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="task t7"):
        build_messages(PromptSettings(), Task(task_id="t7", data=data))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"\boxed{42}", 1.0),
        (r"\boxed{ 42 }", 1.0),
        (r"\boxed{41} no, \boxed{42}", 1.0),
        (r"\boxed{42} no, \boxed{41}", 0.0),
        (r"\boxed{42", 0.0),
        ("42", 0.0),
        (r"\boxed{42.0}", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_a_boxed_integer_is_read_strictly(completion: str, reward: float) -> None:
    assert boxed_integer({"answer": "42"}, completion) == reward


@pytest.mark.parametrize(("max_new_tokens", "stop_reason"), [(50, StopReason.STOP), (3, StopReason.LENGTH)])
async def test_a_single_turn_is_one_sequence_with_its_reward(max_new_tokens: int, stop_reason: StopReason) -> None:
    gateway = FakeGateway(reward=lambda task, completion: float("42" in completion))
    policy = await served_policy(["It is \\boxed{42}"])
    outcome = await SingleTurn(SingleTurnSettings()).run(
        make_task(), make_context(policy, gateway, max_new_tokens=max_new_tokens)
    )
    (sequence,) = outcome.sequences
    assert sequence.stop_reason is stop_reason
    assert sequence.reward == outcome.reward == float(stop_reason is StopReason.STOP)
    assert [s.is_policy for s in sequence.segments] == [False, True]
    assert gateway.graded[0][0] == "math"


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        (["workflow={name: single_turn, settings: {policy: model0}}"], "model1"),
        (["workflow={name: single_turn, settings: {policy: model1}}"], "model0"),
        (["workflow={name: single_turn, settings: {policy: model0}}", "policies.model1.trained=false"], None),
        (["workflow={name: single_turn, settings: {policy: model0}}", "run.steps=0"], None),
        ([], None),
    ],
)
def test_a_trained_policy_that_no_workflow_of_training_plays_is_refused(settings: list[str], idle: str | None) -> None:
    root = Path(__file__).resolve().parents[3]
    recipe = load_recipe(root / "recipes" / "quickstart-two-policies", settings, {})
    if idle is None:
        assert build_workflows(recipe)
        return
    with pytest.raises(ConfigError, match=f"no workflow of training plays the policy {idle}"):
        build_workflows(recipe)


# -- The reward and the tool of docs/workflows.md run, with the workflow that the page names.


PAGE = "workflows.md"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The page's files in a folder of their own, and a recipe for the workflow of the examples."""
    reward, tool = blocks(PAGE, "python")
    workflow = (EXAMPLES / "workflow.py").read_text()
    for name, text in (("retry", workflow), ("exact", reward), ("clock", tool)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"reward": "exact:exact_match", "attempts": 3}
    yield {"workflow": {"name": "retry:Retry", "settings": settings}}
    for name in ("retry", "exact", "clock"):
        sys.modules.pop(name, None)


async def play(config: WorkflowConfig, texts: list[str]) -> Outcome:
    policy = await served_policy(texts)
    return await build_workflow(config).run(make_task(), make_context(policy, FakeGateway()))


@pytest.mark.parametrize(
    ("texts", "reward", "stop_reason", "attempts"),
    [
        (["42"], 1.0, StopReason.STOP, 1),
        (["41", "42"], 0.5, StopReason.STOP, 2),
        (["41", "40", "42"], 0.25, StopReason.STOP, 3),
        (["41"], 0.0, StopReason.TURN_LIMIT, 3),
    ],
)
async def test_the_documented_workflow_and_reward_run(
    recipe: dict[str, Any], texts: list[str], reward: float, stop_reason: StopReason, attempts: int
) -> None:
    outcome = await play(WorkflowConfig(**recipe["workflow"]), texts)
    (sequence,) = outcome.sequences
    assert outcome.reward == sequence.reward == reward
    assert sequence.stop_reason is stop_reason
    assert sequence.segments[-1].is_policy
    assert outcome.metrics["attempts"] == attempts


async def test_the_documented_tool_is_called(recipe: dict[str, Any]) -> None:
    settings = {"tools": ["clock:minutes"], "reward": "exact:exact_match"}
    call = '<tool_call>{"name": "minutes", "arguments": {"hours": "0.7"}}</tool_call>'
    outcome = await play(WorkflowConfig(name="tool_use", settings=settings), [call, "42"])
    (sequence,) = outcome.sequences
    assert outcome.reward == 1.0
    assert (sequence.metrics["tool_calls"], sequence.metrics["tool_errors"]) == (1.0, 0.0)

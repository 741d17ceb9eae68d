"""The reward and the tool of docs/workflows.md run, with the workflow that the page names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.data import WorkflowConfig
from services.common.records import StopReason
from services.inference.workflows.base import Outcome
from services.inference.workflows.registry import build_workflow
from tests.documented import blocks
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, served_policy

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

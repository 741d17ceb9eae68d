"""Environments, tools and tasks of others with their true packages: three training steps each, and the exact tokens of a
tool's rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extras.hub.verifiers.environment import Verifiers
from services.common.config.data import DatasetConfig, WorkflowConfig
from services.common.importing import look_in
from services.common.records import Task
from services.inference.workflows.registry import build_workflow
from services.orchestrator.tasks.datasets import open_source
from tests.integration.inference.endpoint_peers import context_of, serving
from tests.recipe_runs import ROOT, left_running, rows, run_recipe
from tests.recipes.test_every_recipe import TIMEOUT_S
from tests.unit.inference.fakes import served_policy

SMALL = ("run.steps=3", "policies.model0.batch.size=16", "warm_start.model0.steps=20", "evaluation.at_start=false",
         "evaluation.every=0", "data.evaluation.numbers.samples_per_task=1")  # fmt: skip

pytestmark = pytest.mark.recipes


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("recipes/guess", marks=pytest.mark.needs("verifiers")),
        pytest.param("recipes/guess/openenv.yaml", marks=pytest.mark.needs("openenv")),
    ],
)
def test_three_training_steps_with_the_true_package(recipe: str, tmp_path: Path) -> None:
    run_recipe(recipe, (f"run.dir={tmp_path}", "run.id=hub", *SMALL), timeout_s=TIMEOUT_S)
    steps = rows(tmp_path / "hub", "training_step")
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["failures"] == 0 for step in steps)
    assert 0 < sum(step["batch_reward_mean"] for step in steps) / 3 < 1
    assert not left_running(tmp_path / "hub")


@pytest.fixture
async def workflow() -> AsyncIterator[Verifiers]:
    look_in([str(ROOT / "examples")])
    made = build_workflow(WorkflowConfig(name="verifiers"))
    assert isinstance(made, Verifiers)
    yield made
    await made.close()


def first_task(environment: str) -> Task:
    return open_source(DatasetConfig(verifiers=environment), seed=0)[0]


@pytest.mark.needs("verifiers")
async def test_turns_of_an_environment_are_one_sequence_of_exactly_what_was_sampled(workflow: Verifiers) -> None:
    policy = await served_policy(["5", "3", "1"])
    async with serving() as server:
        outcome = await workflow.run(first_task("guess_number"), context_of(policy, server))
    (sequence,) = outcome.sequences
    assert outcome.reward == sequence.reward == 1.0 and outcome.metrics["turns"] == outcome.metrics["guesses"] == 3
    sampled = [policy.chat.decode(segment.token_ids) for segment in sequence.segments if segment.is_policy]
    told = [policy.chat.decode(segment.token_ids) for segment in sequence.segments if not segment.is_policy]
    assert len(sampled) == 3 and [text[0] for text in sampled] == ["5", "3", "1"]
    assert "1 to 8?" in told[0] and "lower" in told[1] and "lower" in told[2]


@pytest.mark.needs("verifiers")
async def test_a_tool_of_a_taskset_is_called_and_its_result_is_read(workflow: Verifiers) -> None:
    call = '<tool_call>{"name": "table_look_up", "arguments": {"word": "ant"}}</tool_call>'
    policy = await served_policy([call, "It is 12."])
    async with serving() as server:
        outcome = await workflow.run(first_task("lookup_tool"), context_of(policy, server))
    (sequence,) = outcome.sequences
    told = [policy.chat.decode(segment.token_ids) for segment in sequence.segments if not segment.is_policy]
    assert outcome.reward == 1.0 and "look_up" in told[0] and "12" in told[1]


@pytest.mark.parametrize(
    ("example", "script"),
    [
        pytest.param("mcp", "call_add", marks=pytest.mark.needs("mcp")),
        pytest.param("reasoning_gym", "answer", marks=pytest.mark.needs("reasoning-gym")),
        pytest.param("gymnasium", "cross", marks=pytest.mark.needs("gymnasium")),
        pytest.param("harbor", "add_lines", marks=pytest.mark.needs("sandbox tier 2")),
    ],
)
def test_an_example_trains_three_steps(example: str, script: str, tmp_path: Path) -> None:
    script_of_policy = f"inference.a.forced.script=tests.recipes.scripts:{script}"
    settings = (f"run.dir={tmp_path}", "run.id=tiny", script_of_policy)
    run_recipe(f"examples/{example}.yaml", settings, "--profile", "tiny", timeout_s=TIMEOUT_S)
    run_dir = tmp_path / "tiny"
    steps = rows(run_dir, "training_step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["failures"] == 0
        assert 0.1 < step["batch_reward_mean"] < 0.9, "half of the answers are right"
    assert not left_running(run_dir)

"""Every file of ``examples/`` works as described, called as by Rollmill."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cli.check.recipe import check_recipe
from services.common.config.algorithm import LossByPath
from services.common.config.data import DatasetConfig, WorkflowConfig
from services.common.config.loading import load_recipe
from services.common.importing import load_object
from services.common.records import Sampling, StopReason
from services.envgateway.envs.base import EnvironmentContext
from services.envgateway.envs.episodes import EnvironmentRegistry
from services.inference.engine.base import FinishReason, GenerationRequest, WeightUpdate
from services.inference.engine.streaming import EngineSetup
from services.inference.workflows.registry import build_workflow
from services.orchestrator.tasks.datasets import open_source
from services.trainer.losses import TokenBatch, check_shape, loss_by_path
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, served_policy

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NAMES = [file.stem for file in EXAMPLES.glob("*.py")]


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("said", "reward"), [(r"so \boxed{42}", 1.0), (r"\boxed{41}", 0.1), ("42", 0.0), (r"\boxed{4", 0.0)]
)
def test_reward(said: str, reward: float) -> None:
    assert load_object("reward:exact_match")({"answer": 42}, said) == reward


@pytest.mark.parametrize(
    ("texts", "reward", "stop_reason", "attempts"),
    [
        ([r"\boxed{42}"], 1.0, StopReason.STOP, 1),
        (["no", r"\boxed{42}"], 0.5, StopReason.STOP, 2),
        (["no", "no"], 0.0, StopReason.TURN_LIMIT, 2),
    ],
)
async def test_workflow(texts: list[str], reward: float, stop_reason: StopReason, attempts: int) -> None:
    config = WorkflowConfig(name="workflow:Retry", settings={"reward": "reward:exact_match"})
    outcome = await build_workflow(config).run(make_task(), make_context(await served_policy(texts), FakeGateway()))
    (sequence,) = outcome.sequences
    assert (outcome.reward, sequence.reward, sequence.stop_reason) == (reward, reward, stop_reason)
    assert outcome.metrics["attempts"] == attempts and sequence.segments[-1].is_policy


async def test_tools_of_the_replica() -> None:
    calls = [
        '<tool_call>{"name": "minutes", "arguments": {"hours": 0.7}}</tool_call>',
        '<tool_call>{"name": "minutes", "arguments": {"hours": -1}}</tool_call>',
        '<tool_call>{"name": "sort_lines", "arguments": {"text": "b\\na"}}</tool_call>',
        "42",
    ]
    settings = {"tools": ["tool:minutes", "tool:sort_lines"], "reward": "math"}
    gateway = FakeGateway()
    policy = await served_policy(calls)
    workflow = build_workflow(WorkflowConfig(name="tool_use", settings=settings))
    (sequence,) = (await workflow.run(make_task(), make_context(policy, gateway))).sequences
    said = [
        policy.chat.decode(segment.token_ids.tolist()) for segment in sequence.segments[1:] if not segment.is_policy
    ]
    assert "42" in said[0] and "hours cannot be negative" in said[1] and "ran import sys" in said[2]
    assert [stdin for _, stdin, _ in gateway.executed] == [b"b\na"]
    assert (sequence.metrics["tool_calls"], sequence.metrics["tool_errors_tool_error"]) == (3.0, 1.0)


def test_environment() -> None:
    registry = EnvironmentRegistry({"guess": "environment:Guess"}, EnvironmentContext(None, None))  # type: ignore[arg-type]
    episode = registry.build("guess")
    assert episode.reset({"most": 7}, seed=3).text == "Guess a number from 1 to 7."  # type: ignore[union-attr]
    low, high, turns = 1, 7, 0
    while True:
        turns += 1
        step = episode.step(str((low + high) // 2))
        if step.done:  # type: ignore[union-attr]
            break
        low, high = ((low + high) // 2 + 1, high) if "too low" in step.observation else (low, (low + high) // 2 - 1)  # type: ignore[union-attr]
    assert step.reward == 1.0 and turns <= 3  # type: ignore[union-attr]
    assert step.metrics == {"guesses": turns}  # type: ignore[union-attr]
    episode.close()


def test_loss() -> None:
    loss = loss_by_path("loss:clipped")
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    tokens = TokenBatch(
        logprobs=logprobs,
        behaviour=torch.zeros(4),
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        mask=torch.tensor([True, True, True, False]),
        sequence_index=torch.zeros(4, dtype=torch.int64),
        num_sequences=1,
    )
    result = loss(tokens, LossByPath(name="loss:clipped", settings={"eps": 0.2, "eps_negative": 0.1}))
    check_shape(result, tokens, "loss:clipped")
    torch.testing.assert_close(result.per_token.detach(), torch.tensor([-1.2, 1.5, 0.9, 0.0]))
    result.per_token.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 1.5, 0.0, 0.0]))
    assert result.counts["cut_tokens"] == 2


async def test_engine() -> None:
    heard: list[int] = []
    setup = EngineSetup(
        policy="model0", context_length=64, num_slots=2, settings={"text": "ab"}, on_tokens=lambda n, _: heard.append(n)
    )
    engine = load_object("engine:Letters")(setup)
    await engine.start()
    requests = [
        GenerationRequest(request_id=str(seed), prompt_ids=(97,), sampling=Sampling(max_new_tokens=24), stop_token_ids=(0,), seed=seed)
        for seed in range(8)
    ]  # fmt: skip
    first, again = [await asyncio.gather(*map(engine.generate, requests)) for _ in range(2)]
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert any(one.finish_reason is FinishReason.STOP and one.token_ids[-1] == 0 for one in first)
    letters = [token for one in first for token in one.token_ids if token]
    assert set(letters) == {97, 98} and max(map(len, (one.token_ids for one in first))) <= 24
    for one in first:
        (segment,) = one.segments
        chances = np.exp(segment.logprobs)
        assert np.allclose(chances[segment.token_ids == 0], 1 / 8) and np.allclose(
            chances[segment.token_ids != 0], 7 / 8
        )
    await engine.update(WeightUpdate(version=3, complete=False))
    assert (await engine.generate(requests[0])).segments[0].weight_version == 3
    assert sum(heard) == sum(len(one.token_ids) for one in [*first, *again, first[0]])
    assert engine.health().ok
    await engine.stop()


def test_dataset() -> None:
    config = DatasetConfig(generator="dataset:sums", settings={"most": 20, "count": 5}, id_field="id")
    source = open_source(config, seed=1)
    assert len(source) == 5 and source[4].task_id == "4"
    assert [source[0].data] == [open_source(config, seed=1)[0].data] != [open_source(config, seed=2)[0].data]


def test_the_recipe_with_two_sources_is_ready_to_run_and_shows_a_row_of_each() -> None:
    recipe = load_recipe(EXAMPLES / "mixture.yaml", environment={})
    assert {name: source.weight for name, source in recipe.data.sources.items()} == {"tool": 3.0, "sums": 1.0}
    assert [recipe.workflow_of(where).name for where in recipe.data.training] == ["tool_use", "single_turn"]
    told = check_recipe(recipe)
    for source, reward in {"tool": "recipes.quickstart.reward:boxed_answer", "sums": "reward:exact_match"}.items():
        assert any(line.startswith(f"first row of {source} scored by {reward}") for line in told)

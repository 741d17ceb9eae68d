"""The end of an episode of verifiers as its process tells it: a reward, or whose failure it is."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import extras.hub.verifiers.child

URL = "http://127.0.0.1:1/v1"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program as its interpreter loads it: with its folder as the place of modules."""
    folder = Path(extras.hub.verifiers.child.__file__ or "").parent
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("verifiers_program", folder / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["messages"]


def trace(name: str = "agent", rewards: Any = None, **changes: Any) -> SimpleNamespace:
    agent = SimpleNamespace(
        name=name,
        trainable=changes.pop("trainable", True),
        config=SimpleNamespace(client=SimpleNamespace(base_url=changes.pop("url", URL))),
    )
    scores = {"right": 1.0} if rewards is None else rewards
    values = {key: None if score is None else SimpleNamespace(value=score) for key, score in scores.items()}
    total = sum(value.value for value in values.values() if value is not None)
    facts = {"ok": True, "errors": [], "is_timeout": False, "num_turns": 2, "metrics": {"length": 3, "odd": None}}
    return SimpleNamespace(**{"agent": agent, "rewards": values, "reward": total, **facts, **changes})


def episode(*traces: SimpleNamespace, errors: tuple[SimpleNamespace, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(traces=list(traces), errors=list(errors))


def error(kind: str) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message="why")


def test_the_reward_is_the_mean_of_the_trained_agents(program: ModuleType) -> None:
    one = program._outcome(episode(trace()), URL)
    assert (one.reward, one.metrics) == (1.0, {"turns": 2.0, "length": 3.0, "reward_right": 1.0})
    two = program._outcome(episode(trace("a", {"x": 1.0, "y": 0.5}), trace("b", {"x": 0.0})), URL)
    assert two.reward == 0.75 and two.metrics["a_reward_y"] == 0.5 and two.metrics["b_turns"] == 2.0
    other = trace("user", {}, trainable=False, url="http://elsewhere/v1")
    assert program._outcome(episode(trace(), other), URL).reward == 1.0


@pytest.mark.parametrize(
    ("played", "kind", "message"),
    [
        (episode(trace(), errors=(error("EnvError"),)), "environment", "EnvError: why"),
        (episode(trace(ok=False, errors=[error("TaskError")])), "environment", "TaskError: why"),
        (episode(trace(ok=False, errors=[error("SandboxError")])), "infrastructure", "SandboxError: why"),
        (episode(trace(ok=False, errors=[error("ProviderError")])), "infrastructure", "ProviderError: why"),
        (episode(trace(is_timeout=True)), "environment", "time limit"),
        (episode(trace(rewards={"right": None})), "environment", "right was not computed"),
        (episode(trace(rewards={})), "environment", "no reward to an agent that is trained"),
        (episode(), "environment", "no reward"),
        (episode(trace(), trace("user", trainable=False)), "settings", r"settings\.user\.client"),
    ],
)
def test_an_episode_without_a_true_reward_is_a_failure(
    program: ModuleType, played: SimpleNamespace, kind: str, message: str
) -> None:
    outcome = program._outcome(played, URL)
    assert outcome.kind == kind and re.search(message, outcome.message)

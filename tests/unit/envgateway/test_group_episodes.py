"""Rollouts of a task group play one episode and sample apart: orders are played against the gateway's own episodes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import InfrastructureError, derived_seed
from services.common.records import Purpose, Task
from services.envgateway.envs.base import EnvironmentContext
from services.envgateway.envs.episodes import EnvironmentRegistry, EpisodeManager
from services.envgateway.tools.registry import ToolBox
from services.inference.rollouts import RolloutPlayer
from services.inference.workflows.base import Episode, Step
from services.inference.workflows.single import AgentEnv, AgentEnvSettings
from tests.documented import blocks
from tests.unit.inference.fakes import FakeGateway, RecordingEngine, Records, make_order, served_policy

PAGE = "environments.md"


class InProcess(FakeGateway):
    """The gateway's episodes without gRPC; remembers the seed and the first observation of each."""

    def __init__(self, episodes: EpisodeManager, lose: int = 0) -> None:
        super().__init__()
        self._episodes = episodes
        self._lose = lose  # first steps that fail
        self.begun: list[tuple[int, str]] = []

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        start = await self._episodes.create("", environment, task.data, seed)
        self.begun.append((seed, start.observation.text))
        return Episode(episode_id=start.episode_id, observation=start.observation.text)

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        if self._lose:
            self._lose -= 1
            raise InfrastructureError("the gateway is gone")
        taken = await self._episodes.step(episode_id, turn, action)
        return Step(observation=taken.observation, reward=taken.reward, done=taken.done)

    async def close(self, episode_id: str) -> None:
        await self._episodes.close(episode_id)


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The documented environment is written out and can be imported; its secrets in the order of the episodes."""
    for name, text in zip(("guess", "walk"), blocks(PAGE, "python"), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from guess import Guess  # type: ignore[import-not-found]

    found: list[int] = []
    reset = Guess.reset

    def remembering(self: Any, task: Mapping[str, Any], seed: int) -> Any:
        observation = reset(self, task, seed)
        found.append(self.number)
        return observation

    monkeypatch.setattr(Guess, "reset", remembering)
    yield found
    for name in ("guess", "walk"):
        sys.modules.pop(name, None)


@asynccontextmanager
async def playing(
    environment: str, paths: Mapping[str, str] | None = None, lose: int = 0
) -> AsyncIterator[tuple[RolloutPlayer, InProcess, Records, RecordingEngine]]:
    known = EnvironmentRegistry(paths or {}, EnvironmentContext(None, ToolBox([])))  # type: ignore[arg-type]
    episodes = EpisodeManager(known, max_episodes=64, lease_s=60)
    gateway, records, policy = InProcess(episodes, lose), Records(), await served_policy(["50"])
    workflow = AgentEnv(AgentEnvSettings(environment=environment, max_turns=2))
    player = RolloutPlayer(
        workflows=dict.fromkeys(Purpose, workflow),
        policies={"model0": policy},
        gateway=gateway,
        sink=records,
        replica_id="a",
        num_slots=64,
        infra_retries=2,
    )
    assert isinstance(policy.engine, RecordingEngine)
    yield player, gateway, records, policy.engine
    await episodes.close_all()
    await known.close()


def sampling_seeds(engine: RecordingEngine) -> list[int | None]:
    """Of the first request of every attempt."""
    return [request.seed for request in engine.requests if request.request_id.endswith("/0")]


async def test_a_group_of_the_documented_environment_has_one_secret_and_eight_sampling_seeds(
    secrets: list[int],
) -> None:
    """Review, defect 1: the eight rollouts had the secrets 49, 77, 85, 58, 47, 60, 66 and 37."""
    paths = EnvGatewayConfig(**yaml.safe_load(blocks(PAGE, "yaml")[0])["envgateway"]).environments
    async with playing("guess", paths) as (player, gateway, records, engine):
        for position in range(5):
            seed = derived_seed(1, "train", position)
            player.play(make_order(f"abc-{position}", range(8), task=Task(task_id="1", data={}), seed=seed))  # type: ignore[arg-type]
            await player.wait_until_idle()
    assert len(records.trajectories) == len(secrets) == 40
    groups = [set(secrets[first : first + 8]) for first in range(0, 40, 8)]
    assert all(len(group) == 1 for group in groups)
    assert len(set().union(*groups)) > 1, "another task group plays another episode"
    assert len(set(sampling_seeds(engine))) == 40
    assert not {seed for seed, _ in gateway.begun} & set(sampling_seeds(engine)), "one does not tell the other"


async def test_another_attempt_and_another_run_play_the_same_episode_with_the_same_sampling_seeds(
    secrets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds do not depend on the name of the task group, which differs between runs."""
    monkeypatch.setattr("services.inference.rollouts._RETRY_BASE_S", 0.001)

    async def played(group: str, lose: int) -> tuple[set[int], list[int | None]]:
        secrets.clear()
        async with playing("guess", {"guess": "guess:Guess"}, lose) as (player, _, records, engine):
            player.play(make_order(group, (2, 5), task=Task(task_id="1", data={}), seed=9))
            await player.wait_until_idle()
            assert len(records.trajectories) == 2
            assert player.counters.retries == lose
        return set(secrets), sampling_seeds(engine)

    secret, seeds = await played("0a1b2c-00000001", lose=0)
    again, seeds_again = await played("ffffff-00000007", lose=2)
    assert secret == again and len(secret) == 1
    assert len(set(seeds)) == 2 and set(seeds) == set(seeds_again) and len(seeds_again) == 4

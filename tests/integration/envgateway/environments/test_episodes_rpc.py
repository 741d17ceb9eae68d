"""Episodes over gRPC when clients, environments and numbers misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.errors import (
    CapacityError,
    EpisodeNotFoundError,
    InfrastructureError,
)
from services.common.pb import environment_pb2 as pb
from services.envgateway.envs.base import Observation, StepResult
from services.envgateway.envs.episodes import EpisodeManager
from tests.clock import Clock
from tests.integration.envgateway.environments.serving import Client, registry, serving
from tests.waiting import until

RELEASE = threading.Event()


class Obedient:
    """Actions are orders: ``end``, ``slow``, ``stall``; ``held`` until a test sets ``gate``."""

    gate: asyncio.Event
    begun: list[str]

    def __init__(self, context: object) -> None:
        self.steps = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if reset_s := task.get("reset_s"):
            self.begun.append("reset")
            await asyncio.sleep(reset_s)
        return Observation(text="begin")

    async def step(self, action: str) -> StepResult:
        if action == "stall":
            await asyncio.sleep(60)
        if action == "held":
            self.begun.append(action)
            await self.gate.wait()
        if action == "slow":
            await asyncio.sleep(1.0)
        self.steps += 1
        return StepResult(observation=str(self.steps), reward=1.0, done=action == "end")

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """``held`` actions wait for a gate of the test's own loop."""
    monkeypatch.setattr(Obedient, "gate", asyncio.Event(), raising=False)
    monkeypatch.setattr(Obedient, "begun", [], raising=False)


class Plain:
    """With plain methods, one of which may never return."""

    def __init__(self, context: object) -> None:
        pass

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation(text="begin")

    def step(self, action: str) -> StepResult:
        if action == "stall":
            RELEASE.wait(60)
        return StepResult(observation=action)

    def close(self) -> None:
        pass


class Served:
    def __init__(self, client: Client, episodes: EpisodeManager, clock: Clock) -> None:
        self.client = client
        self.episodes = episodes
        self.clock = clock


@asynccontextmanager
async def _served(**settings: Any) -> AsyncIterator[Served]:
    known = registry(factories={"obedient": Obedient, "plain": Plain})  # type: ignore[dict-item]
    clock = Clock()
    episodes = EpisodeManager(known, clock=clock, **{"max_episodes": 100, "lease_s": 10.0, **settings})
    async with serving(episodes, known) as client:
        yield Served(client, episodes, clock)


async def test_a_caller_that_leaves_loses_no_turn() -> None:
    async with _served() as served:
        episode = (await served.client.create("obedient", {})).episode_id
        request = pb.StepEpisodeRequest(episode_id=episode, turn=1, action="slow")
        with pytest.raises(grpc.aio.AioRpcError) as left:
            await served.client.stub.StepEpisode(request, timeout=0.05)
        assert left.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await served.client.step(episode, 1, "slow")).observation == "1"


async def test_closing_an_episode_ends_a_waiting_step() -> None:
    async with _served() as served:
        episode = (await served.client.create("obedient", {})).episode_id
        turn = asyncio.create_task(served.client.step(episode, 1, "held"))
        await until(lambda: Obedient.begun, "the turn is taken")
        await served.client.close(episode)
        with pytest.raises(EpisodeNotFoundError, match="closed while"):
            await turn


@pytest.mark.parametrize("kind", ["obedient", "plain"])
async def test_stalled_environments_fail_and_block_no_other_episode(kind: str) -> None:
    RELEASE.clear()
    async with _served(step_timeout_s=1.0) as served:
        client = served.client
        stalled = [(await client.create(kind, {})).episode_id for _ in range(80)]
        turns = [asyncio.create_task(client.step(episode, 1, "stall")) for episode in stalled]
        for outcome in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(outcome, (InfrastructureError, EpisodeNotFoundError))  # the second when it asked again
            assert "longer than 1 s" in outcome.message
        assert (served.episodes.num_live, served.episodes.counts["failed"]) == (0, 80)
        healthy = (await client.create(kind, {})).episode_id
        assert (await client.step(healthy, 1, "go")).observation in ("1", "go")
        with pytest.raises(EpisodeNotFoundError, match="longer than 1 s"):
            await client.step(stalled[0], 1, "stall")
    RELEASE.set()


async def test_a_stop_ends_episodes_that_are_starting() -> None:
    async with _served() as served:
        begin = asyncio.create_task(served.client.create("obedient", {"reset_s": 60}))
        await until(lambda: Obedient.begun, "it starts")
        await served.episodes.close_all()
        with pytest.raises(EpisodeNotFoundError, match="stopping"):
            await begin
        with pytest.raises(InfrastructureError, match="stopping"):
            await served.client.create("obedient", {})
        assert served.episodes.num_live == 0


async def test_a_storm_of_creates_never_exceeds_the_limit_and_all_get_a_turn() -> None:
    async with _served(max_episodes=8) as served:
        most_live = 0

        async def play(number: int) -> str:
            nonlocal most_live
            while True:
                try:
                    # Two calls with one id, as a client repeats that has lost the answer.
                    request = ("obedient", {"reset_s": 0.001})
                    both = [served.client.create(*request, request_id=f"r{number}") for _ in range(2)]
                    one, other = await asyncio.gather(*both)
                    break
                except CapacityError as full:
                    await asyncio.sleep((full.retry_after_s or 600) / 50)
            assert one.episode_id == other.episode_id
            most_live = max(most_live, served.episodes.num_live)
            end = await served.client.step(one.episode_id, 1, "end")
            await served.client.close(one.episode_id)
            return end.observation

        assert await asyncio.gather(*(play(number) for number in range(60))) == ["1"] * 60
        assert 1 < most_live <= 8 and served.episodes.num_live == 0
        assert served.episodes.counts["created"] == served.episodes.counts["closed"] == 60

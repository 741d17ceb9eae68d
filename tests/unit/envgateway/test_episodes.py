"""Leases, expiry, capacity and repeated steps, on scripted environments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from services.common.errors import (
    CapacityError,
    EpisodeNotFoundError,
    InfrastructureError,
    InvalidRequestError,
    StateError,
    UnknownEnvironmentError,
)
from services.envgateway.envs.base import EnvironmentLike, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.episodes import EpisodeManager
from tests.clock import Clock


class Counter:
    """Counts its steps; actions are orders: fail, crash, stall, end."""

    def __init__(self) -> None:
        self.steps = 0
        self.closed = 0
        self.failures = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if task.get("reset") == "crash":
            raise RuntimeError("cannot begin")
        await asyncio.sleep(task.get("reset_s", 0))
        return Observation(text=f"seed {seed}")

    async def step(self, action: str) -> StepResult:
        if action == "crash":
            raise RuntimeError("lost my world")
        if action == "stall":
            await asyncio.sleep(60)
        if action == "fail once" and not self.failures:
            self.failures += 1
            raise InfrastructureError("a peer is gone")
        if action == "slow":
            await asyncio.sleep(0.05)
        self.steps += 1
        return StepResult(observation=str(self.steps), reward=0.5, done=action == "end")

    async def close(self) -> None:
        self.closed += 1


class Leaving(Counter):
    """Ends the process, or cancels the task, where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        if where == "build":
            raise SystemExit(where)

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if self._where == "reset":
            raise asyncio.CancelledError(self._where)
        return await super().reset(task, seed)

    async def step(self, action: str) -> StepResult:
        raise GeneratorExit(action)


class Worlds:
    def __init__(self) -> None:
        self.built: list[Counter] = []

    def build(self, name: str) -> EnvironmentLike:
        if name.startswith("leaves in "):
            return Leaving(name.removeprefix("leaves in "))
        if name != "counter":
            raise UnknownEnvironmentError(f"no environment {name!r}")
        self.built.append(Counter())
        return self.built[-1]


def _manager(**settings: Any) -> tuple[EpisodeManager, Worlds, Clock]:
    worlds, clock = Worlds(), Clock()
    settings = {"max_episodes": 3, "lease_s": 10.0, "step_timeout_s": 5.0, **settings}
    return EpisodeManager(worlds, clock=clock, **settings), worlds, clock


async def test_an_episode_from_create_to_close() -> None:
    manager, worlds, _ = _manager()
    start = await manager.create("r", "counter", {}, 7)
    assert (start.observation.text, start.lease_s, manager.num_live) == ("seed 7", 10.0, 1)
    assert (await manager.step(start.episode_id, 1, "go")).observation == "1"
    assert (await manager.step(start.episode_id, 2, "end")).done
    await manager.close(start.episode_id)
    await manager.close(start.episode_id)
    assert (manager.num_live, worlds.built[0].closed) == (0, 1)
    with pytest.raises(EpisodeNotFoundError):
        await manager.step(start.episode_id, 2, "end")


@pytest.mark.parametrize("where", ["build", "reset"])
async def test_an_environment_that_leaves_at_its_start_fails_its_episode_alone(where: str) -> None:
    manager, _, _ = _manager()
    with pytest.raises(InfrastructureError, match=f"(SystemExit|CancelledError): {where}"):
        await manager.create("r", f"leaves in {where}", {}, 0)
    assert (await manager.create("s", "counter", {}, 7)).observation.text == "seed 7"


async def test_an_environment_whose_turn_raises_what_ends_a_coroutine_is_lost() -> None:
    manager, _, _ = _manager()
    episode = (await manager.create("r", "leaves in step", {}, 0)).episode_id
    with pytest.raises(EpisodeLostError, match="GeneratorExit: go"):
        await manager.step(episode, 1, "go")


async def test_a_repeated_create_gives_the_same_episode_even_while_it_begins() -> None:
    manager, worlds, _ = _manager()
    first, second = await asyncio.gather(*(manager.create("r", "counter", {"reset_s": 0.02}, 0) for _ in range(2)))
    third = await manager.create("r", "counter", {}, 0)
    assert first.episode_id == second.episode_id == third.episode_id and len(worlds.built) == 1
    other = await manager.create("s", "counter", {}, 0)
    assert other.episode_id != first.episode_id


async def test_a_repeated_turn_is_not_taken_twice() -> None:
    manager, worlds, _ = _manager()
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    first, joined = await asyncio.gather(*(manager.step(episode, 1, "slow") for _ in range(2)))
    again = await manager.step(episode, 1, "whatever")
    assert first is joined is again and worlds.built[0].steps == 1
    await manager.step(episode, 2, "go")
    assert await manager.step(episode, 1, "go") is first


async def test_two_different_steps_at_once_are_refused() -> None:
    manager, worlds, _ = _manager()
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    slow = asyncio.create_task(manager.step(episode, 1, "slow"))
    await asyncio.sleep(0)
    with pytest.raises(StateError, match="another action"):
        await manager.step(episode, 1, "go")
    with pytest.raises(InvalidRequestError, match="the next is 1"):
        await manager.step(episode, 2, "go")
    assert (await slow).observation == "1" and worlds.built[0].steps == 1


@pytest.mark.parametrize("turn", [0, -1, 3])
async def test_a_turn_that_does_not_follow_is_refused(turn: int) -> None:
    manager, _, _ = _manager()
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    await manager.step(episode, 1, "go")
    with pytest.raises(InvalidRequestError):
        await manager.step(episode, turn, "go")


async def test_no_step_follows_the_end() -> None:
    manager, _, _ = _manager()
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    end = await manager.step(episode, 1, "end")
    with pytest.raises(StateError, match="ended with turn 1"):
        await manager.step(episode, 2, "go")
    assert await manager.step(episode, 1, "end") is end


async def test_an_infrastructure_failure_leaves_the_turn_to_be_repeated() -> None:
    manager, _, _ = _manager()
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    with pytest.raises(InfrastructureError):
        await manager.step(episode, 1, "fail once")
    assert (await manager.step(episode, 1, "fail once")).observation == "1"


@pytest.mark.parametrize("action", ["crash", "stall"])
async def test_a_broken_environment_is_an_infrastructure_failure_and_its_episode_ends(action: str) -> None:
    manager, worlds, _ = _manager(step_timeout_s=0.05)
    episode = (await manager.create("r", "counter", {}, 0)).episode_id
    with pytest.raises(InfrastructureError):
        await manager.step(episode, 1, action)
    assert (manager.num_live, worlds.built[0].closed, manager.counts["failed"]) == (0, 1, 1)


async def test_an_environment_that_cannot_be_built_is_an_infrastructure_failure_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, worlds, _ = _manager(max_episodes=1)

    def build(name: str) -> EnvironmentLike:
        raise OSError("no such world")

    with monkeypatch.context() as broken:
        broken.setattr(worlds, "build", build)
        with pytest.raises(
            InfrastructureError, match=r"test_episodes\.py:\d+: environment counter raised .*no such world"
        ):
            await manager.create("r", "counter", {}, 0)
    await manager.create("r", "counter", {}, 0)
    assert manager.num_live == 1


async def test_a_failed_reset_holds_no_place_and_may_be_repeated() -> None:
    manager, worlds, _ = _manager(max_episodes=1)
    with pytest.raises(InfrastructureError, match="cannot begin"):
        await manager.create("r", "counter", {"reset": "crash"}, 0)
    with pytest.raises(UnknownEnvironmentError):
        await manager.create("r", "nowhere", {}, 0)
    await manager.create("r", "counter", {}, 0)
    assert (manager.num_live, worlds.built[0].closed) == (1, 1)


async def test_capacity_is_refused_with_a_time_to_come_back() -> None:
    manager, _, clock = _manager(max_episodes=2)
    results = await asyncio.gather(
        *(manager.create("", "counter", {"reset_s": 0.01}, 0) for _ in range(3)), return_exceptions=True
    )
    (refused,) = (r for r in results if isinstance(r, BaseException))
    assert isinstance(refused, CapacityError) and refused.retry_after_s
    clock.now = 11.0
    await manager.expire()
    await manager.create("", "counter", {}, 0)


async def test_a_step_renews_an_episode_that_waits_for_others_to_expire() -> None:
    many = 40  # more than close at once
    manager, worlds, clock = _manager(max_episodes=many)
    episodes = [(await manager.create(str(number), "counter", {}, 0)).episode_id for number in range(many)]
    may_close = asyncio.Event()

    async def slow_close() -> None:
        await may_close.wait()

    for world in worlds.built:
        world.close = slow_close  # type: ignore[method-assign]
    clock.now += 10.0
    expiring = asyncio.create_task(manager.expire())
    await asyncio.sleep(0)
    stepping = asyncio.create_task(manager.step(episodes[-1], 1, "slow"))
    await asyncio.sleep(0)
    may_close.set()
    await expiring
    assert (await stepping).observation == "1"
    assert manager.num_live == 1


async def test_silence_expires_an_episode_and_a_step_renews_it() -> None:
    manager, worlds, clock = _manager()
    silent = (await manager.create("a", "counter", {}, 0)).episode_id
    active = (await manager.create("b", "counter", {}, 0)).episode_id
    clock.now = 6.0
    await manager.step(active, 1, "go")
    clock.now = 11.0
    await manager.expire()
    with pytest.raises(EpisodeNotFoundError):
        await manager.step(silent, 1, "go")
    await manager.step(active, 2, "go")
    assert (worlds.built[0].closed, worlds.built[1].closed) == (1, 0)


async def test_a_running_step_keeps_its_episode() -> None:
    manager, _, clock = _manager()
    episode = (await manager.create("a", "counter", {}, 0)).episode_id
    step = asyncio.create_task(manager.step(episode, 1, "slow"))
    await asyncio.sleep(0.01)
    clock.now = 100.0
    await manager.expire()
    assert (await step).observation == "1"
    assert (await manager.step(episode, 2, "go")).observation == "2"

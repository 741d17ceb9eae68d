"""Harbor's task directories in the true sandbox: commands, tests at the end, and every way in which a reward can be missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from extras.hub import harbor_episode
from extras.hub.harbor import read_task
from extras.hub.harbor_episode import HarborEpisode
from extras.hub.settings import HarborConfig
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import EpisodeLostError, StepResult
from services.envgateway.sandbox.pool import SandboxPool
from tests import needs
from tests.integration.envgateway.sandbox_state import assert_clean
from tests.waiting import until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
Play = Callable[..., Awaitable[StepResult]]


@pytest.fixture
async def play(pool: SandboxPool) -> AsyncIterator[Play]:
    """Plays a task with these commands to its end; the sandbox is empty afterwards."""
    if pool.tier != "2":
        needs.unmet("sandbox tier 2", f"the sandbox runs at tier {pool.tier}")
    episodes: list[HarborEpisode] = []

    async def run(directory: Path, *commands: str, told: list[str] | None = None, **settings: Any) -> StepResult:
        episode = HarborEpisode(pool.live, HarborConfig(**settings))
        episodes.append(episode)
        await episode.reset({"harbor": {"directory": str(directory), "refusal": ""}}, 0)
        for command in commands:
            result = await episode.step(call(command))
            if result.done:
                return result
            if told is not None:
                told.append(result.observation)
        result = await episode.step("That is all.")
        await episode.close()
        return result

    yield run
    for episode in episodes:
        await episode.close()
    await until(lambda: not pool.live.gauges["live_processes"])
    await assert_clean(pool)


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def solution(task: str) -> str:
    return (EXAMPLES / task / "solution" / "solve.sh").read_text()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of a task, to be changed."""
    return shutil.copytree(EXAMPLES / "add-numbers", tmp_path / "mine")


def write_test(task: Path, text: str) -> None:
    (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{text}\n")


async def test_a_solution_gives_1_a_wrong_one_0_and_half_of_one_a_half(play: Play) -> None:
    assert (await play(EXAMPLES / "add-numbers", solution("add-numbers"))).reward == 1.0
    assert (await play(EXAMPLES / "add-numbers", "echo 7 > sum.txt")).reward == 0.0
    whole = await play(EXAMPLES / "count-lines", solution("count-lines"))
    assert (whole.reward, whole.metrics["reward_files"]) == (1.0, 2.0)
    assert (await play(EXAMPLES / "count-lines", "echo 'a.log 2' > counts.txt")).reward == 0.5


async def test_the_agent_sees_neither_tests_nor_the_machine_and_leaves_nothing_that_the_tests_trust(
    play: Play, task: Path
) -> None:
    told: list[str] = []
    done = await play(
        task,
        "ls /tests /solution /logs; cat /etc/shadow /root/.ssh/* /proc/1/environ; pwd; cat numbers.txt | head -1",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &",
        "rm -rf /tests; ln -s /app /tests",
        told=told,
    )
    assert done.reward == 0.0
    assert "test.sh" not in told[0] and "solve.sh" not in told[0]
    assert "/app\n12" in told[0] and told[0].count("denied") + told[0].count("No such file") >= 3
    assert done.metrics["commands"] == 4.0


async def test_commands_end_at_their_limits_and_the_task_goes_on(
    play: Play, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(harbor_episode, "COMMAND_TIME_S", 1.0)
    done = await play(task, "sleep 300", "yes", "exit 3", "true", solution("add-numbers"), told=told)
    assert "stopped after 1 s" in told[0]
    assert "printed too much" in told[1]
    assert told[2:4] == ["(exit code 3)", "(no output)"]
    assert done.reward == 1.0


async def test_a_command_that_ends_the_sandbox_is_no_silent_zero(play: Play, task: Path) -> None:
    done = await play(task, "kill -9 -1; kill -9 $PPID; sleep 5")
    assert done.done and done.reward == 0.0
    assert done.metrics["sandboxes_ended"] == 1.0


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("exit 0", "neither"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "which one counts"),
        ("ln -s /app/numbers.txt /logs/verifier/reward.txt", "neither"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 300", "did not end within 1 s"),
        ("kill -9 $PPID; sleep 5", "the tests ended"),
    ],
)
async def test_a_verifier_without_a_reward_loses_the_episode(
    play: Play, task: Path, test: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_test(task, test)
    monkeypatch.setattr(harbor_episode, "VERIFIER_TIME_S", 1.0)
    with pytest.raises(EpisodeLostError, match=says):
        await play(task)


@pytest.mark.parametrize(
    "leaves",
    [
        "head -c 400000000 /dev/zero > fill; echo 10 > sum.txt",
        "cd /; rm -rf /app/* /app/.*; mv /app /tmp/gone; echo file > /app",
        "chmod 000 .",
        "ln -sf /dev/zero sum.txt",
        "mkfifo sum.txt",
        "mkdir -p sum.txt/a; chmod 000 sum.txt",
    ],
)
async def test_leavings_that_keep_the_tests_from_a_reward_are_worth_0(
    play: Play, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harbor_episode, "VERIFIER_TIME_S", 3.0)
    done = await play(EXAMPLES / "add-numbers", leaves)
    assert (done.done, done.reward) == (True, 0.0)


async def test_tests_that_give_no_reward_before_any_command_lose_the_episode_after_one(play: Play, task: Path) -> None:
    write_test(task, "exit 0")
    with pytest.raises(EpisodeLostError, match="neither"):
        await play(task, solution("add-numbers"))


async def test_the_tests_run_after_the_agents_time(pool: SandboxPool, play: Play, task: Path) -> None:
    now = [0.0]
    episode = HarborEpisode(pool.live, HarborConfig(), clock=lambda: now[0])
    await episode.reset({"harbor": {"directory": str(task), "refusal": ""}}, 0)
    await episode.step(call(solution("add-numbers")))
    now[0] = read_task(task).agent_s
    late = await episode.step(call("rm sum.txt"))
    await episode.close()
    assert (late.done, late.reward, late.metrics["agent_timeouts"]) == (True, 1.0, 1.0)


async def test_a_task_that_needs_programs_is_refused_unless_they_are_here(play: Play, task: Path) -> None:
    with (task / "environment" / "Dockerfile").open("a") as file:
        file.write("RUN apt-get install -y jq\n")
    with pytest.raises(InvalidRequestError, match=r"mine: Dockerfile line 4: RUN apt-get .*harbor.skip_run: true"):
        await play(task)
    assert (await play(task, solution("add-numbers"), skip_run=True)).reward == 1.0

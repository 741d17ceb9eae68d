"""Where rewards come from: the gateway's RewardService by a built-in name, or a function of this process by path.

A reward function is ``def reward(task: Mapping[str, Any], completion: str) -> float`` (or the same ``async def``);
``task`` is the dataset row and ``completion`` the text of the policy's last turn. One that raises, returns no finite number
or takes longer than ``REWARD_TIMEOUT_S`` fails its rollout alone, with its reason in the counters.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.common.accounts import during_here
from services.common.aio import deadline
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.threads import DaemonThreads
from services.common.types import Task
from services.inference.workflows.base import Gateway, Reward

RewardFunction = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
Grader = Callable[[Gateway, Task, str], Awaitable[Reward]]

REWARD_TIMEOUT_S = 60.0  # of a function of the user; one that takes longer fails the rollout and is never a reward
REWARD_ACTIVITY = "running the reward function"  # in time accounts, before its path
REWARD_THREADS = DaemonThreads(4)

_BOXED_INTEGER = re.compile(r"\\boxed\{\s*([+-]?\d+)\s*\}")


def build_grader(reward: str) -> Grader:
    """``module:function`` runs here; any other name is scored by the gateway."""
    if ":" not in reward:

        async def remote(gateway: Gateway, task: Task, completion: str) -> Reward:
            return await gateway.compute_reward(reward, task, completion)

        return remote

    function: RewardFunction = load_object(reward)
    if not callable(function):
        raise ConfigError(f"workflow.settings.reward: {reward} is no function of (task, completion)")

    async def local(gateway: Gateway, task: Task, completion: str) -> Reward:
        limit = deadline(REWARD_TIMEOUT_S, f"reward {reward} of task {task.task_id}")
        with during_here(f"{REWARD_ACTIVITY} {reward}"):
            async with limit:
                # In a thread: a function that never returns must not stop the replica's other rollouts.
                value = await REWARD_THREADS.run(function, task.data, completion)
                number = float(await value if inspect.isawaitable(value) else value)
        if not math.isfinite(number):
            raise ValueError(f"reward {reward} returned {number} for task {task.task_id}; it must be a finite number")
        return Reward(value=number)

    return local


def boxed_integer(task: Mapping[str, Any], completion: str) -> float:
    """1 when the last well-formed ``\\boxed{}`` with an integer equals ``task["answer"]``, else 0.

    >>> boxed_integer({"answer": "1786"}, r"it is \\boxed{1786}")
    1.0
    """
    answers = _BOXED_INTEGER.findall(completion)
    return float(bool(answers) and int(answers[-1]) == int(task["answer"]))

"""Computes rewards: by the gateway's RewardService under a built-in name, or by a function of this process.

A reward function is ``def reward(task: Mapping[str, Any], completion: str) -> float`` (or the same ``async def``);
``task`` is the dataset row and ``completion`` the text of the policy's last turn. One that raises, returns no finite number
or takes longer than ``REWARD_TIMEOUT_S`` fails its rollout alone, with its reason in the counters. A plain function runs in a
thread; there are as many as the service has slots, so a function that waits, say for a judge, keeps no other one waiting.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.common.aio import deadline
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.records.dataset_rows import BuiltInReward
from services.common.records.types import Task
from services.common.system.threads import DaemonThreads
from services.common.telemetry.accounts import during_here
from services.common.telemetry.activities import ActivityName
from services.common.user_code import check_call
from services.inference.workflows.base import Gateway, Reward

RewardFunction = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
Grader = Callable[[Gateway, Task, str], Awaitable[Reward]]

# Of a function of the user, from its beginning; one that takes longer fails the rollout and is never a reward.
REWARD_TIMEOUT_S = 60.0
_THREAD_WAIT_S = (
    600.0  # for a free thread, which a rollout waits for only where a workflow scores several answers at once
)
REWARD_THREADS = DaemonThreads(4)  # more as the service has more slots

_BOXED_INTEGER = re.compile(r"\\boxed\{\s*([+-]?\d+)\s*\}")


def build_grader(reward: str) -> Grader:
    """``module:function`` runs here; any other name is scored by the gateway."""
    if ":" not in reward:
        if reward not in tuple(BuiltInReward):
            raise ConfigError(_no_reward(reward))

        async def remote(gateway: Gateway, task: Task, completion: str) -> Reward:
            return await gateway.compute_reward(reward, task, completion)

        return remote

    function: RewardFunction = load_object(reward)
    check_call(function, reward, "def reward(task, completion) -> float", "task", "completion")

    async def local(gateway: Gateway, task: Task, completion: str) -> Reward:
        given = await call_reward(function, reward, task, completion)
        return Reward(value=finite_reward(given, reward, f"task {task.task_id}"))

    return local


async def call_reward(function: Callable[..., Any], reward: str, task: Task, judged: Any) -> Any:
    """The value of the user's function ``reward`` for a task and what is judged. Raises ``DeadlineError`` after
    ``REWARD_TIMEOUT_S``."""
    what = f"reward {reward} of task {task.task_id}"
    limit = deadline(_THREAD_WAIT_S, f"the wait of {what} for a thread")
    with during_here(ActivityName.RUNNING_REWARD.of(reward)):
        async with limit:
            # In a thread: a function that never returns must not stop the replica's other rollouts.
            value = await REWARD_THREADS.run(
                function, task.data, judged, on_begin=lambda: limit.begin_again(REWARD_TIMEOUT_S, what)
            )
            return await value if inspect.isawaitable(value) else value


def _no_reward(name: str) -> str:
    """The error about a reward that is neither a built-in one nor an import path."""
    module, _, function = name.rpartition(".")
    close = (
        [f"{module}:{function}"]
        if module
        else difflib.get_close_matches(name, [each.value for each in BuiltInReward], n=1)
    )
    meant = f", did you mean {close[0]!r}?" if close else "."
    return (
        f"workflow.settings.reward: there is no reward {name!r}{meant} Write one of {', '.join(sorted(BuiltInReward))}, or the "
        "import path of a function, package.module:function"
    )


def finite_reward(given: Any, reward: str, where: str) -> float:
    """The number that a reward function returned; raises ``ValueError`` for None, text, NaN and other things that are none.

    >>> finite_reward(True, "rewards:exact", "task 7")
    1.0
    """
    hint = ": is a `return` missing in one of its branches?" if given is None else ""
    try:
        number = float(given) if not isinstance(given, str | bytes | None) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        given = number = math.inf  # its digits may be too many to show
    if not math.isfinite(number):
        shown = given if isinstance(given, float) else repr(given)[:60]
        raise ValueError(f"reward {reward} returned {shown} for {where}; must be a finite number{hint}")
    return number


def boxed_integer(task: Mapping[str, Any], completion: str) -> float:
    """1 when the last well-formed ``\\boxed{}`` with an integer equals ``task["answer"]``, else 0.

    >>> boxed_integer({"answer": "1786"}, r"it is \\boxed{1786}")
    1.0
    """
    answers = _BOXED_INTEGER.findall(completion)
    return float(bool(answers) and int(answers[-1]) == int(task["answer"]))

"""A replica's calls of one moment reach the gateway in one message, and each has its own answer or its own error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

import pytest

from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import InvalidRequestError
from services.common.records import Task
from services.common.rpc.interceptors import Context
from services.common.telemetry.accounts import TimeAccount
from services.envgateway import app
from services.envgateway.app import Gateway
from services.envgateway.rpc import by_client
from services.envgateway.sandbox.pool import SandboxPool
from services.inference.gateway import GatewayClient
from tests.integration.envgateway.conftest import LONG, SLEEP_LONG
from tests.integration.envgateway.sandbox_state import assert_clean
from tests.waiting import until


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the gateway by method."""
    counted: Counter[str] = Counter()

    def counting(method: str, context: Context) -> AbstractContextManager[object]:
        counted[method.rpartition("/")[2]] += 1
        return by_client(method, context)

    monkeypatch.setattr(app, "by_client", counting)
    return counted


@pytest.fixture
async def both(methods: Counter[str]) -> AsyncIterator[tuple[Gateway, GatewayClient]]:
    gateway = Gateway(EnvGatewayConfig(port=0, sandbox=LONG), SandboxPool.start_before_threads(LONG))
    await gateway.start()
    client = GatewayClient(TimeAccount("replica/a"))
    client.connect(gateway.server.address)
    yield gateway, client
    await client.stop()
    await gateway.stop()


def _task(factor: int) -> Task:
    cases = [{"args": [number], "expected": number * factor} for number in range(3)]
    return Task(task_id=str(factor), data={"tests": {"kind": "call", "entry_point": "f", "cases": cases}})


async def test_each_call_of_a_message_has_its_own_answer(
    both: tuple[Gateway, GatewayClient], methods: Counter[str]
) -> None:
    gateway, client = both
    codes = [f"print({number % 3} * 7)" for number in range(9)]
    found = await asyncio.gather(*map(client.execute_code, codes))
    assert [one.stdout for one in found] == [f"{number % 3 * 7}\n" for number in range(9)]
    texts = [f"def f(x):\n    return x * {factor}" for factor in (2, 3, 2)]
    rewards = await asyncio.gather(*(client.compute_reward("code", _task(2), text) for text in texts))
    assert [one.value for one in rewards] == [1.0, 0.0, 1.0]
    assert methods == {"ExecuteCodes": 1, "ComputeRewards": 1}
    assert gateway.queue.gauges["queue_joined"] == 1


async def test_an_error_reaches_its_own_caller(both: tuple[Gateway, GatewayClient], methods: Counter[str]) -> None:
    _, client = both
    calls = (client.compute_reward(name, _task(2), "def f(x): return 2 * x") for name in ("unheard-of", "code"))
    wrong, right = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(wrong, InvalidRequestError) and "unheard-of" in wrong.message
    assert not isinstance(right, BaseException) and right.value == 1.0
    # the timeouts of the two differ, so neither has company
    assert methods == {"ComputeReward": 2}
    calls = (
        client.compute_reward("code", task, "def f(x): return 2 * x") for task in (Task(task_id="x", data={}), _task(2))
    )
    wrong, right = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(wrong, InvalidRequestError) and "tests" in wrong.message
    assert not isinstance(right, BaseException) and right.value == 1.0
    assert methods == {"ComputeReward": 3, "ComputeRewards": 1}


async def test_a_slow_program_holds_up_no_other_and_ends_with_its_callers(both: tuple[Gateway, GatewayClient]) -> None:
    gateway, client = both
    sleeper, quick = (asyncio.create_task(client.execute_code(code)) for code in (SLEEP_LONG, "print(1)"))
    assert (await quick).stdout == "1\n" and not sleeper.done()
    sleeper.cancel()
    await asyncio.wait([sleeper])
    await until(lambda: not gateway.sandbox.gauges["sandbox_busy_slots"])
    await assert_clean(gateway.sandbox)

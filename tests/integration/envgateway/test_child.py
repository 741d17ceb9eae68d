"""A child process that answers questions: order, deaths, and what is left of it after ``kill``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.common.errors import InfrastructureError
from services.envgateway import child as child_module
from services.envgateway.child import Child, ChildDied, ChildLost
from services.envgateway.sandbox.bare import wire
from tests.running import is_running
from tests.waiting import WAIT_S

MODULE = "tests.integration.envgateway.toy_child"


def question(kind: str, number: int = 0) -> bytes:
    return wire.encode({"kind": kind, "number": number})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    started = Child(MODULE)
    await started.start("the toy")
    yield started
    started.kill()
    assert not is_running(started.pid)


async def test_questions_are_answered_in_their_order_also_behind_a_caller_that_left(child: Child) -> None:
    asked = [asyncio.create_task(child.ask(question("echo", n))) for n in range(20)]
    await asyncio.sleep(0)
    for task in asked[::3]:
        task.cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for n, answer in enumerate(answers):
        assert isinstance(answer, asyncio.CancelledError) if n % 3 == 0 else answer["number"] == n  # type: ignore[index]
    assert (await child.ask(question("echo", 77)))["number"] == 77


@pytest.mark.parametrize(("kind", "killed_by"), [("crash", signal.SIGSEGV), ("leave", 0)])
async def test_the_question_at_which_the_child_died_gets_the_death_and_the_next_are_lost(
    child: Child, kind: str, killed_by: int
) -> None:
    asked = [child.ask(question(kind)), child.ask(question("echo")), child.ask(question("echo"))]
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, ChildDied) and first.signal == killed_by
    assert all(isinstance(other, ChildLost) for other in others)
    with pytest.raises(ChildLost):
        await child.ask(question("echo"))


async def test_a_message_that_answers_no_question_ends_the_channel(child: Child) -> None:
    assert (await child.ask(question("twice")))["kind"] == "unasked"
    await until(lambda: child.failure is not None)
    with pytest.raises(ChildLost):
        await child.ask(question("echo"))


async def test_kill_ends_the_processes_that_the_child_started_and_its_waiting_callers() -> None:
    child = Child(MODULE)
    await child.start("the toy")
    grandchild = (await child.ask(question("fork")))["child"]
    waiting = [asyncio.create_task(child.ask(question("wait"))) for _ in range(2)]
    await asyncio.sleep(0)
    child.kill()
    child.kill()
    results: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, ChildLost) for result in results)
    await until(lambda: not is_running(grandchild) and not is_running(child.pid))


async def test_a_group_whose_first_process_has_died_is_killed(child: Child) -> None:
    grandchild = (await child.ask(question("fork")))["child"]
    with pytest.raises(ChildDied):
        await child.ask(question("leave"))
    child.kill()
    await until(lambda: not is_running(grandchild))


@pytest.mark.parametrize(
    ("module", "arguments", "timeout_s"), [("tests.no_such_module", [], 60.0), (MODULE, ["silent"], 0.5)]
)
async def test_a_child_that_is_never_ready_is_named_and_killed(
    module: str, arguments: list[str], timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_START_TIMEOUT_S", timeout_s)
    child = Child(module, arguments)
    with pytest.raises(InfrastructureError, match="the toy does not start"):
        await child.start("the toy")
    assert not is_running(child.pid)


async def test_a_cancelled_start_leaves_no_process() -> None:
    child = Child(MODULE, ["silent"])
    start = asyncio.create_task(child.start("the toy"))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled() and not is_running(child.pid)

"""Calls of one event-loop iteration are one message; a call that fails in a batch is sent alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.aio import TaskOwner
from services.inference.gateway import MOST_BYTES, MOST_CALLS, CallBatcher
from tests.waiting import until


class Peer:
    """Answers ``n`` with ``str(n)``, in the order that the test allows."""

    def __init__(self) -> None:
        self.alone: list[int] = []
        self.messages: list[list[int]] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.failed: set[int] = set()  # in company
        self.broken_after: int | None = None  # answers of a message
        self.cancelled = 0
        self.tasks = TaskOwner()
        self.sizes: dict[int, int] = {}
        self.calls: CallBatcher[int, str] = CallBatcher(
            self.tasks, self._alone, self._batch, lambda number: self.sizes.get(number, 1)
        )

    async def _alone(self, number: int, timeout_s: float) -> str:
        self.alone.append(number)
        if number < 0:
            raise ValueError(number)
        return str(number)

    async def _batch(self, numbers: list[int], timeout_s: float) -> AsyncIterator[list[tuple[int, str | None]]]:
        self.messages.append(numbers)
        try:
            for place, number in sorted(enumerate(numbers), key=lambda one: one[1]):
                if self.broken_after is not None and place >= self.broken_after:
                    raise grpc.RpcError
                if number in self.gates:
                    await self.gates[number].wait()
                yield [(place, None if number in self.failed or number < 0 else str(number))]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def ask(self, *numbers: int, timeout_s: float = 1.0) -> list[Any]:
        asked = [asyncio.create_task(self.calls.call(number, timeout_s)) for number in numbers]
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    yield made
    await made.tasks.close()


async def test_calls_of_one_round_are_one_message(peer: Peer) -> None:
    assert await peer.ask(3, 1, 2) == ["3", "1", "2"]
    assert peer.messages == [[3, 1, 2]] and not peer.alone


async def test_a_call_without_company_is_made_alone(peer: Peer) -> None:
    assert await peer.ask(1) == ["1"] and await peer.ask(2) == ["2"]
    assert peer.alone == [1, 2] and not peer.messages


async def test_an_answer_waits_for_no_other(peer: Peer) -> None:
    peer.gates[2] = asyncio.Event()
    first, second = (asyncio.create_task(peer.calls.call(number, 1.0)) for number in (1, 2))
    assert await first == "1" and not second.done()
    peer.gates[2].set()
    assert await second == "2" and not peer.alone


async def test_calls_of_other_timeouts_are_other_messages(peer: Peer) -> None:
    found = await asyncio.gather(peer.ask(1, 2, timeout_s=1.0), peer.ask(3, 4, timeout_s=9.0))
    assert found == [["1", "2"], ["3", "4"]] and sorted(peer.messages) == [[1, 2], [3, 4]]


async def test_a_call_that_failed_in_company_is_made_alone_and_tells_why(peer: Peer) -> None:
    peer.failed.add(2)
    one, two, three = await peer.ask(1, 2, -3)
    assert (one, two) == ("1", "2") and isinstance(three, ValueError)
    assert sorted(peer.alone) == [-3, 2]


async def test_a_message_that_breaks_leaves_each_call_its_answer(peer: Peer) -> None:
    peer.broken_after = 2
    assert await peer.ask(0, 1, 2, 3) == ["0", "1", "2", "3"]
    assert sorted(peer.alone) == [2, 3]


async def test_who_leaves_takes_nobody_along_and_the_last_ends_the_message(peer: Peer) -> None:
    peer.gates[1] = asyncio.Event()
    first, second = (asyncio.create_task(peer.calls.call(number, 1.0)) for number in (1, 2))
    await until(lambda: peer.messages, every_s=0)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0)
    assert not peer.cancelled and not second.done()
    second.cancel()
    await asyncio.wait([second])
    await until(lambda: not len(peer.tasks), every_s=0)
    assert peer.cancelled == 1


async def test_who_left_before_the_message_is_not_in_it(peer: Peer) -> None:
    asked = [asyncio.create_task(peer.calls.call(number, 1.0)) for number in (1, 2, 3)]
    asyncio.get_running_loop().call_soon(asked[1].cancel)  # after the calls were made, before they are sent
    assert (await asyncio.gather(*asked, return_exceptions=True))[::2] == ["1", "3"]
    assert peer.messages in ([[1, 3]], [[1, 2, 3]])


async def test_messages_are_bounded(peer: Peer) -> None:
    numbers = list(range(MOST_CALLS + 3))
    assert await peer.ask(*numbers) == list(map(str, numbers))
    assert [len(message) for message in peer.messages] == [MOST_CALLS, 3]
    peer.messages.clear()
    peer.sizes = {1: MOST_BYTES, 2: MOST_BYTES // 2, 3: MOST_BYTES // 2, 4: 3 * MOST_BYTES}
    assert await peer.ask(1, 2, 3, 4) == ["1", "2", "3", "4"]
    assert peer.messages == [[2, 3]] and sorted(peer.alone) == [1, 4]


@pytest.mark.parametrize("answers", [[(7, "x")], [(0, "0"), (0, "again")], []])
async def test_odd_answers_leave_each_call_its_own(answers: list[tuple[int, str]]) -> None:
    tasks = TaskOwner()

    async def alone(number: int, timeout_s: float) -> str:
        return str(number)

    async def batch(numbers: list[int], timeout_s: float) -> AsyncIterator[list[tuple[int, str]]]:
        yield answers

    calls: CallBatcher[int, str] = CallBatcher(tasks, alone, batch, lambda _: 1)
    assert await asyncio.gather(calls.call(0, 1.0), calls.call(1, 1.0)) == ["0", "1"]
    await tasks.close()

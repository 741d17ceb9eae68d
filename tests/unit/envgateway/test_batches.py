"""Calls of one message are answered at their ends, and end when their caller leaves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from services.common.errors import CapacityError
from services.envgateway.rpc import answered


async def test_each_is_answered_as_it_ends_and_those_that_end_together_in_one_list() -> None:
    gates = [asyncio.Event() for _ in range(4)]

    async def answer(number: int) -> int:
        await gates[number].wait()
        return 10 * number

    lists = answered(range(4), answer)
    gates[2].set()
    assert await anext(lists) == [(2, 20)]
    for number in (3, 0, 1):
        gates[number].set()
    found = [one async for some in lists for one in some]
    assert sorted(found) == [(0, 0), (1, 10), (3, 30)]


async def test_a_call_that_fails_has_no_answer_and_a_fault_of_ours_ends_no_other() -> None:
    async def answer(number: int) -> int:
        if number == 1:
            raise CapacityError("full")
        if number == 2:
            raise KeyError(number)
        return number

    assert [one async for some in answered((0, 1), answer) for one in some] == [(0, 0), (1, None)]
    assert [one async for some in answered((0, 2), answer) for one in some] == [(0, 0), (1, None)]


async def test_leaving_ends_running_calls() -> None:
    cancelled = []

    async def answer(number: int) -> int:
        if number == 0:
            return 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    async with aclosing(answered(range(3), answer)) as lists:
        assert await anext(lists) == [(0, 0)]
    assert sorted(cancelled) == [1, 2]


async def test_no_calls_have_no_answers_and_many_have_one_each() -> None:
    async def answer(number: int) -> int:
        return number

    assert [some async for some in answered((), answer)] == []
    assert len([one async for some in answered(range(256), answer) for one in some]) == 256

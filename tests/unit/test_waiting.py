"""Waits of tests end with their condition, and name it when it does not come."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import accepted, until, wait_until


async def test_a_wait_ends_when_another_task_makes_the_condition_true() -> None:
    done: list[int] = []
    asyncio.get_running_loop().call_later(0.02, done.append, 1)
    await until(lambda: done, "the call")
    assert done == [1]


async def test_a_condition_that_does_not_come_is_named() -> None:
    with pytest.raises(AssertionError, match="not within 0 s: the end"):
        await until(lambda: False, "the end", timeout_s=0.0)
    with pytest.raises(AssertionError, match="not within 0 s: the end"):
        wait_until(lambda: False, "the end", timeout_s=0.0)


async def test_a_refused_call_is_repeated_until_it_is_accepted_and_another_error_is_raised() -> None:
    errors: list[Exception] = [KeyError("1"), KeyError("2")]

    async def call() -> str:
        if errors:
            raise errors.pop()
        return "answer"

    assert await accepted(call, KeyError) == "answer" and not errors
    errors.append(OSError("another"))
    with pytest.raises(OSError, match="another"):
        await accepted(call, KeyError)
    errors.append(KeyError("3"))
    with pytest.raises(AssertionError, match=r"refused for 0 s: KeyError\('3'\)"):
        await accepted(call, KeyError, timeout_s=0.0)

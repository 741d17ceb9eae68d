"""Waits have names, tasks have owners, and backing off is bounded."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest
from structlog.testing import capture_logs

from services.common.aio import TaskOwner, backoff, deadline, ended
from services.common.errors import DeadlineError


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_wait_that_runs_out_says_which_and_how_long() -> None:
    with pytest.raises(DeadlineError, match=r"^the batch of step 7 took longer than 0.01 s$") as caught:
        async with deadline(0.01, "the batch of step 7"):
            await forever()
    assert caught.value.metadata == {"wait": "the batch of step 7"}


async def test_a_timeout_from_inside_is_not_mistaken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="inner"):
        async with deadline(30.0, "outer"):
            raise TimeoutError("inner")


async def test_cancelling_a_wait_is_not_a_deadline() -> None:
    async def wait() -> None:
        async with deadline(30.0, "the peer"):
            await forever()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_backoff_grows_to_its_bound_with_jitter() -> None:
    delays = list(islice(backoff(1.0, 8.0), 200))
    for delay, most in zip(delays, [1.0, 2.0, 4.0] + [8.0] * 197, strict=True):
        assert most / 2 <= delay <= most
    assert len(set(delays[3:])) > 150


async def test_leaving_cancels_and_awaits_what_runs() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async with TaskOwner() as tasks:
        tasks.start(work(), "work")
        await asyncio.sleep(0)
        assert len(tasks) == 1
    assert ended == ["cleaned up"]
    assert len(tasks) == 0


async def test_the_first_failure_is_logged_and_told_to_whoever_waits() -> None:
    async def fail(error: Exception) -> None:
        raise error

    with capture_logs() as logs:
        async with TaskOwner() as tasks:
            tasks.start(fail(ValueError("first")), "sender")
            tasks.start(fail(ValueError("second")), "receiver")
            with pytest.raises(ValueError, match="first"):
                await tasks.failed()
    assert [event["task"] for event in logs if event["event"] == "task.failed"] == ["sender", "receiver"]


async def test_nothing_starts_after_the_owner_has_closed() -> None:
    tasks = TaskOwner()
    await tasks.close()
    with pytest.raises(RuntimeError, match="late was started after its owner had closed"):
        tasks.start(forever(), "late")


async def test_a_task_may_close_its_own_owner() -> None:
    tasks = TaskOwner()
    await tasks.start(tasks.close(), "closer")


async def test_a_task_that_ignores_its_cancellation_is_named() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    tasks = TaskOwner()
    task = tasks.start(stubborn(), "stubborn")
    await asyncio.sleep(0)
    with pytest.raises(DeadlineError, match=r"cancelling stubborn took longer than 0.01 s"):
        await tasks.close(timeout_s=0.01)
    release.set()
    await task


async def test_a_caller_that_is_cancelled_while_it_ends_a_task_is_cancelled() -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            ending.set()
            await may_end.wait()

    async def caller() -> None:
        await ended(task)
        raise AssertionError("its cancellation was lost")

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    calling = asyncio.create_task(caller())
    await ending.wait()
    calling.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.wait({task})


async def test_the_error_of_a_task_that_was_ended_is_left_to_its_reader() -> None:
    async def fails_at_its_end() -> None:
        try:
            await forever()
        finally:
            raise ValueError("at the end")

    task = asyncio.create_task(fails_at_its_end())
    await asyncio.sleep(0)
    await ended(task)
    with pytest.raises(ValueError, match="at the end"):
        task.result()

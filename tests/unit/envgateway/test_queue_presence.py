"""Whether Redis was emptied is told from answers that may arrive in another order than Redis gave them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.envgateway.queue.streams import runner as runner_module
from services.envgateway.queue.streams.names import Names
from services.envgateway.queue.streams.runner import StreamsRunner
from tests.waiting import WAIT_S


class HeldAnswers:
    """A client of Redis that answers ``SET ... GET`` when the test allows."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def pipeline(self, transaction: bool) -> HeldAnswers:
        return self

    async def __aenter__(self) -> HeldAnswers:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    def set(self, *arguments: Any, **options: Any) -> None: ...

    def smembers(self, name: str) -> None: ...

    async def execute(self) -> list[Any]:
        self.asked.set()
        return await self.answer


@pytest.mark.parametrize(("known_before", "losses"), [(False, 0), (True, 1)])
async def test_a_late_answer_of_the_first_request_is_no_loss(
    known_before: bool, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark was absent when the request was made; another request's answer, made later, arrives first."""
    monkeypatch.setattr(runner_module, "_LOOK_PAUSE_S", 0.0)
    client = HeldAnswers()
    runner = StreamsRunner(cast(Any, client), Names("test"), lambda slots: None)
    if known_before:
        runner._note_presence(True, present=False)
    looking = asyncio.create_task(runner._maintain())
    await asyncio.wait_for(client.asked.wait(), WAIT_S)
    runner._note_presence(True, present=False)
    client.answer.set_result([None, set()])
    await asyncio.wait_for(looking, WAIT_S)
    assert runner.counts["redis_losses"] == losses

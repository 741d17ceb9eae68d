"""The judge's handling of a host that sends invalid frames."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.envgateway.judge.judge import CaseHost, HostedCase
from services.envgateway.judge.records import framed
from services.envgateway.sandbox.bare.endings import NOT_STOPPED, CaseRecord

_LIMITS: dict[str, float | int] = {
    "wall_s": 1.0, "cpu_s": 1.0, "memory_bytes": 1 << 20, "answer_bytes": 100, "output_bytes": 100,
}  # fmt: skip


def record(number: int) -> bytes:
    return CaseRecord(number, NOT_STOPPED, False, 0, 0.1, 0.1, 1, b"out", b"", b"", b"").packed()


class _Run:
    def __init__(self, said: list[bytes]) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        for data in said:
            self.messages.put_nowait(SimpleNamespace(data=data))

    def write(self, data: bytes) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True
        self.messages.put_nowait(None)


@pytest.mark.parametrize(
    "said", [framed(b"no record"), framed(record(1)[:-1]), framed(record(0)), framed(record(3)), framed(record(2) * 2)],
    ids=["too short", "cut", "told again", "too far", "the same twice"],
)  # fmt: skip
async def test_a_host_that_sends_invalid_frames_is_ended(said: bytes) -> None:
    run = _Run([framed(record(0) + record(1)), framed(b""), said])

    class Slot:
        async def start(self, job: Any) -> _Run:
            return run

    host = CaseHost(Slot(), "plain", b"", [HostedCase(_LIMITS)] * 4, 5.0, False)  # type: ignore[arg-type]
    assert [found.number for found in await host.start(2)] == [0, 1]
    assert len(await host.ask(2)) <= 1 and run.cancelled

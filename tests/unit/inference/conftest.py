"""Running engines, and a gate that stops an engine after an exact number of steps."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.common.extras import provided
from services.inference.engine.base import Engine
from tests.waiting import WAIT_S


class StepGate:
    """An ``on_tokens`` hook that holds the engine thread after step ``at`` until a command lies in its inbox."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._steps = 0
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._open = threading.Event()

    def __call__(self, num_tokens: int, when: float) -> None:
        self._steps += 1
        if self._steps == self._at:
            self._loop.call_soon_threadsafe(self._reached.set)
            assert self._open.wait(timeout=WAIT_S), "no call came through the gate"

    async def reached(self) -> None:
        """Wait for the end of step ``at``; the engine's thread is held then, until ``open``."""
        async with asyncio.timeout(WAIT_S):
            await self._reached.wait()

    def open(self) -> None:
        self._open.set()

    async def run(self, command: Awaitable[Any]) -> Any:
        """Run ``command`` exactly between steps ``at`` and ``at + 1``."""
        await self.reached()
        task = asyncio.ensure_future(command)
        await asyncio.sleep(0)
        self.open()
        return await task


Launch = Callable[..., Awaitable[Any]]


@pytest.fixture
def torch_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch decodes small models too, as it does on a GPU."""
    from services.inference.engine.torch import decoder

    build = decoder.fast_step
    monkeypatch.setattr(
        decoder, "fast_step", lambda own, slots, how: None if how == "eager" else build(own, slots, how)
    )


@pytest.fixture(params=["torch", *(["compiled"] if "torch_native" in provided("engines") else [])])
def each_decoder(request: pytest.FixtureRequest) -> str:
    """The test runs once with compiled code and once with torch."""
    if request.param == "torch":
        request.getfixturevalue("torch_decoder")
    return str(request.param)


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Start a torch engine on a deep copy of a model; all are stopped at the end."""
    from services.inference.engine.torch.engine import TorchEngine

    running: list[Engine] = []

    async def start(model: Any, kind: type[TorchEngine] = TorchEngine, **settings: Any) -> TorchEngine:
        engine = kind(copy.deepcopy(model), **{"num_slots": 8, "context_length": 256, **settings})
        await engine.start()
        running.append(engine)
        return engine

    yield start
    for engine in running:
        await engine.stop()

"""A disk that is really full: the run directory on a small tmpfs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from tests.integration.orchestrator.conftest import Orchestrator
from tests.small_disk import fill, mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    # Room for the run's own files: SQLite's log alone takes 2.3 MB when a loaded machine commits in small steps.
    with mounted(tmp_path / "small", "32m") as place:
        yield place


@asynccontextmanager
async def training_on(
    disk: Path, num_steps: int
) -> AsyncIterator[tuple[Orchestrator, ScriptedReplica, Callable[[], None]]]:
    """A run after three steps; its trainer goes on when the third value is called; every step is trained on other
    sequences. However slow the machine, most of the run is still to come when the disk is filled."""
    orchestrator = Orchestrator(
        disk / "run", run__steps=num_steps, evaluation__at_start=False, evaluation__at_end=False
    )
    peers: list[ScriptedReplica | ScriptedTrainer] = []
    try:
        replica, trainer = await orchestrator.start_with(peers, latency_s=0.02, train_s=0.02)
        async with asyncio.timeout(90):
            await trainer.run(3)
            rest: list[asyncio.Future[None]] = []
            yield (
                orchestrator,
                replica,
                lambda: rest.append(asyncio.ensure_future(trainer.train(range(4, num_steps + 1)))),
            )
            await asyncio.gather(*rest)
            await trainer.stopped.wait()
            assert await orchestrator.wait() == 0
        trained = [name for pulled in trainer.pulled.values() for name in pulled.ids]
        assert len(trained) == len(set(trained)) == num_steps * 16
    finally:
        for peer in peers:
            await peer.close()
        orchestrator.close()


@pytest.mark.slow
async def test_one_that_is_killed_while_the_disk_is_full_goes_on_when_there_is_room(small_disk: Path) -> None:
    async with training_on(small_disk, 12) as (orchestrator, _, go_on):
        fill(small_disk / "filler")
        go_on()
        orchestrator.kill()
        orchestrator.process = orchestrator.spawn()
        with pytest.raises(TimeoutError):  # it neither ends nor serves
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(orchestrator.wait())), 3.0)
        (small_disk / "filler").unlink()

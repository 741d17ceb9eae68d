"""The real orchestrator, killed with -9 and started on a journal with damaged or missing records: the damage is
reported, and training goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from services.common.records import SetAsideReason
from services.orchestrator.journal import entries
from tests.integration.orchestrator.conftest import Orchestrator
from tests.unit.orchestrator.damage import flip, loaded, rows
from tests.waiting import until

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]

STEPS = 20
STEPS_EACH = 4  # for each kill
KINDS = (  # that are damaged at each kill
    (entries.TRAJECTORY, entries.CLOSED),
    (entries.GROUP, entries.STATE),
    (entries.VERDICT,),
    (entries.VERSION, entries.BATCH),
)


def spoil(run_dir: Path, kind: str, rng: random.Random) -> None:
    """Damage three records of a kind among the last thirty; of versions and batches only superseded ones."""
    found = rows(run_dir, kind)
    if kind in (entries.VERSION, entries.BATCH):
        found = found[:-2]
    for row in rng.sample(found[-30:], min(3, len(found))):
        same = [other.number for other in rows(run_dir, kind, row.key)]
        flip(run_dir, kind, row.key, same.index(row.number))


@pytest.mark.slow
async def test_a_run_whose_journal_is_damaged_again_and_again_comes_to_its_end(
    orchestrators: Make, peers: Peers
) -> None:
    orchestrator = orchestrators(run__steps=STEPS)
    _, trainer = await orchestrator.start_with(peers, latency_s=0.01, train_s=0.02)
    rng = random.Random(3)
    step = 1
    async with asyncio.timeout(150):
        await trainer.join()
        await trainer.publish(0)
        for kinds in KINDS:
            # Few steps at a time: while an orchestrator starts, a fast run would take all that are left.
            training = asyncio.ensure_future(trainer.train(range(step, step + STEPS_EACH)))
            await until(lambda enough=step + STEPS_EACH - 2: len(trainer.pulled) >= enough)
            orchestrator.kill()
            for kind in kinds:
                spoil(orchestrator.run_dir, kind, rng)
            await orchestrator.start()
            await training
            step += STEPS_EACH
        await trainer.train(range(step, STEPS + 1))
        await trainer.stopped.wait()
        assert await orchestrator.wait() == 0
    assert orchestrator.summary()["steps"] == {"model0": STEPS}
    trained = [name for pulled in trainer.pulled.values() for name in pulled.ids]
    assert len(trained) == len(set(trained))
    noted = loaded(orchestrator.run_dir, entries.SET_ASIDE)
    assert noted and all(SetAsideReason(record["reason"]) for record in noted)
    assert len({(record["kind"], record["number"]) for record in noted}) == len(noted)

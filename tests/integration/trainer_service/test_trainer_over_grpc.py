"""The loop, the link and the client of one trainer against real gRPC: ids, commands, an orchestrator that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import SupersededError, UnknownPolicyError
from services.common.records import RankBatch
from services.trainer.checkpoints import Checkpoints
from services.trainer.link import GrpcLink, LoopThread
from services.trainer.loop import TrainingLoop
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import Targets
from services.trainer.model.micro_batches import Document
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.integration.trainer_service.conftest import MakeOrchestrator, failure_of
from tests.integration.trainer_service.orchestrating import FakeOrchestrator
from tests.unit.trainer.building import algorithm, path_of, train_step
from tests.unit.trainer_service.building import POLICY, DigestPublisher, batch_of
from tests.waiting import until

STEPS = 6


class LocalTrainer:
    """A trainer in a thread of the test's process; ``life`` is its task."""

    def __init__(self, orchestrator: FakeOrchestrator, directory: Path) -> None:
        self.step: TrainStep = train_step(algorithm())
        self._thread = LoopThread("trainer-grpc")
        self.link = GrpcLink(self._thread, orchestrator.address, orchestrator.run_id, POLICY)
        self._loop = TrainingLoop(
            step=self.step,
            link=self.link,
            publisher=DigestPublisher(self.step),
            checkpoints=Checkpoints(directory, "r", POLICY, 2, Ranks.single()),
            ranks=Ranks.single(),
            device=None,
            num_steps=STEPS,
            checkpoint_every=100,
        )
        self.life: asyncio.Task[int] = asyncio.ensure_future(asyncio.to_thread(self._live))

    def leave(self) -> None:
        self.link.leave()

    async def close(self) -> None:
        self.leave()
        await asyncio.wait([self.life], timeout=60.0)
        await asyncio.to_thread(self.link.close)
        self._thread.stop()

    def _live(self) -> int:
        done = self._loop.run(self._loop.recover(0, self.link.join(())))
        self._loop.wait_for_stop(done)
        return done


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[FakeOrchestrator], LocalTrainer]]:
    made: list[LocalTrainer] = []

    def make(orchestrator: FakeOrchestrator) -> LocalTrainer:
        made.append(LocalTrainer(orchestrator, tmp_path / f"checkpoints{len(made)}"))
        return made[-1]

    yield make
    for trainer in made:
        await trainer.close()


Start = Callable[[FakeOrchestrator], LocalTrainer]


async def test_exactly_the_sampled_ids_are_trained(
    make_orchestrator: MakeOrchestrator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 1, the trainer's end: ids, log-probabilities and versions arrive as recorded, and so does each token
    that goes through the model."""
    batches: list[RankBatch] = []
    forwarded: list[tuple[int, ...]] = []
    run, forward = TrainStep.run, PolicyModel.forward

    def spy_run(self: TrainStep, batch: RankBatch, *others: Any) -> Any:
        batches.append(batch)
        return run(self, batch, *others)

    def spy_forward(
        self: PolicyModel,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: Documents,
        targets: Targets,
        *rest: Any,
    ) -> Any:
        if torch.is_grad_enabled() and batches[-1].training_step == 1:
            for row, last in zip(
                *(targets.each(t).tolist() for t in (targets.predecessors, targets.token_ids)), strict=True
            ):
                forwarded.append((*token_ids[path_of(documents.branches, row)].tolist(), last))
        return forward(self, token_ids, position_ids, documents, targets, *rest)

    monkeypatch.setattr(TrainStep, "run", spy_run)
    monkeypatch.setattr(PolicyModel, "forward", spy_forward)
    orchestrator = await make_orchestrator()
    assert await start(orchestrator).life == STEPS

    assert [batch.training_step for batch in batches] == [1, 2, 3, 4, 5, 6]
    for got in batches:
        recorded = batch_of(got.training_step)
        assert got.minibatches == recorded.minibatches
        assert [s.sequence_id for s in got.sequences] == [s.sequence_id for s in recorded.sequences]
        for mine, theirs in zip(got.sequences, recorded.sequences, strict=True):
            assert (mine.group_mean, mine.group_std, mine.staleness) == (
                theirs.group_mean,
                theirs.group_std,
                theirs.staleness,
            )
            for a, b in zip(mine.sequence.segments, theirs.sequence.segments, strict=True):
                assert (a.source, a.weight_version) == (b.source, b.weight_version)
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
    # Each trained token, with all that comes before it.
    sampled = [
        tuple(s.sequence.token_ids[: position + 1].tolist())
        for s in batch_of(1).sequences
        for position in np.flatnonzero(Document.from_training_sequence(s, 0.0).loss_mask)
    ]
    assert sorted(forwarded) == sorted(sampled)


async def test_commands_reach_a_trainer_that_waits_for_a_batch_and_it_reports_the_wait(
    make_orchestrator: MakeOrchestrator, start: Start
) -> None:
    orchestrator = await make_orchestrator()
    orchestrator.held_step = 3
    trainer = start(orchestrator)
    await orchestrator.until(lambda: 3 in orchestrator.pulls, "step 3 was never asked for")
    await orchestrator.until(
        lambda: bool(orchestrator.reports) and orchestrator.reports[-1].training_step == 3, "no report"
    )
    assert orchestrator.reports[-1].state == "waiting for a batch"
    assert {"waited_s", "step_seconds"} <= set(orchestrator.reports[-1].gauges)
    assert {"loss", "mismatch_abs", "mismatch_kl", "grad_norm"} <= orchestrator.metrics[2].keys()
    (interval,) = orchestrator.intervals[2]
    assert interval.start_s < interval.end_s

    await orchestrator.tell("checkpoint")
    await until(lambda: trainer.link.report.checkpoint_step == 2)
    asked = len(orchestrator.pulls)
    await asyncio.sleep(0.5)
    assert len(orchestrator.pulls) <= asked + 1, "it does not poll"

    await orchestrator.tell("pause")
    await until(lambda: trainer.link.report.state == "paused")
    await orchestrator.hold(4)
    await asyncio.sleep(0.5)
    assert orchestrator.newest == 2
    await orchestrator.tell("resume")
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")

    await orchestrator.tell("stop")
    assert await asyncio.wait_for(trainer.life, 30.0) == 3
    assert trainer.link.report.checkpoint_step == 3


async def test_a_version_whose_record_the_orchestrator_lost_is_offered_again(
    make_orchestrator: MakeOrchestrator, start: Start
) -> None:
    orchestrator = await make_orchestrator()
    orchestrator.held_step = 4
    trainer = start(orchestrator)
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")
    digest = orchestrator.ledger[3]
    await orchestrator.stop_serving()
    del orchestrator.ledger[3]
    await orchestrator.serve()
    await orchestrator.until(lambda: 3 in orchestrator.ledger, "version 3 was not offered again")
    assert orchestrator.ledger[3] == digest
    orchestrator.held_step = None
    assert await trainer.life == STEPS
    assert len(orchestrator.joins) >= 2 and len({join.incarnation for join in orchestrator.joins}) == 1
    assert orchestrator.counters["conflicts"] == 0


async def test_an_orchestrator_that_is_away_when_a_version_is_published_gets_it_later(
    make_orchestrator: MakeOrchestrator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator = await make_orchestrator()
    computing, go_on = asyncio.Event(), asyncio.Event()
    loop, run = asyncio.get_running_loop(), TrainStep.run

    def slow_run(self: TrainStep, batch: RankBatch, *others: Any) -> Any:
        if batch.training_step == 3:
            loop.call_soon_threadsafe(computing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60.0)
        return run(self, batch, *others)

    monkeypatch.setattr(TrainStep, "run", slow_run)
    trainer = start(orchestrator)
    await asyncio.wait_for(computing.wait(), 60.0)
    await orchestrator.stop_serving()
    go_on.set()
    await until(lambda: trainer.link.report.state == "publishing")
    await orchestrator.serve()
    assert await trainer.life == STEPS


async def test_a_newer_trainer_takes_over_and_the_older_one_leaves(
    make_orchestrator: MakeOrchestrator, start: Start
) -> None:
    orchestrator = await make_orchestrator()
    orchestrator.held_step = 2
    older = start(orchestrator)
    await orchestrator.until(lambda: 2 in orchestrator.pulls, "step 2 was never asked for")
    newer = start(orchestrator)
    await asyncio.wait([older.life], timeout=30.0)
    assert isinstance(failure_of(older.life), SupersededError)
    await orchestrator.release()
    assert await newer.life == STEPS
    assert len(orchestrator.joins) == 2


async def test_a_refused_trainer_says_why(make_orchestrator: MakeOrchestrator, start: Start) -> None:
    orchestrator = await make_orchestrator()
    orchestrator.refusal = UnknownPolicyError("no policy 'model0' in this run")
    trainer = start(orchestrator)
    await asyncio.wait([trainer.life], timeout=30.0)
    assert isinstance(failure_of(trainer.life), UnknownPolicyError)

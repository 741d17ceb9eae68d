"""The order of things: commands between steps, recovery without publishing, checkpoints that are tried again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.errors import BatchLostError, ModelMismatchError, VersionConflictError
from services.common.records import NO_TURN, DeviceTurn, RankBatch, WeightVersion
from services.trainer import loop as loop_module
from services.trainer.checkpoints import Checkpoints
from services.trainer.loop import DeviceTurns, TrainingLoop
from services.trainer.numerics import MismatchError
from services.trainer.ranks import Ranks
from services.trainer.step import BeforeUpdate
from tests.unit.trainer.building import algorithm, train_step
from tests.unit.trainer_service.building import DigestPublisher, batch_of

STEPS = 5


@dataclass
class FakeLink:
    """Records all calls; ``before_pull`` may change the commands."""

    before_pull: Callable[[FakeLink, int], None] = lambda link, step: None
    ledger: dict[int, str] = field(default_factory=dict)
    pulls: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    checkpoint_steps: list[int] = field(default_factory=list)  # the newest, each time it is told
    kept: list[list[int]] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)
    checkpoint: bool = False
    paused: bool = False
    stopped: bool = False
    leaving: bool = False
    device_turn: DeviceTurn = NO_TURN
    turns_done: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def pull(self, training_step: int) -> RankBatch | None:
        self.pulls.append(training_step)
        self.before_pull(self, training_step)
        return None if self.paused or self.stopped else batch_of(training_step)

    def publish(self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[object]) -> None:
        self.published.append(version.number)
        if self.ledger.setdefault(version.number, version.digest) != version.digest:
            raise VersionConflictError("another digest")

    def set_state(self, state: str, training_step: int) -> None:
        self.states.append(state)

    def set_gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    def set_checkpoint_steps(self, kept: Sequence[int]) -> None:
        self.checkpoint_steps.append(max(kept, default=0))
        self.kept.append(list(kept))

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)
        self.stopped = True  # a person ends the run

    def set_device_turn(self, number: int) -> None:
        self.turns_done.append(number)

    def take_checkpoint_command(self) -> bool:
        asked, self.checkpoint = self.checkpoint, False
        return asked


class Trainer:
    """A process life: fresh model, the checkpoints of its predecessors."""

    def __init__(
        self,
        directory: Path,
        link: FakeLink,
        checkpoint_every: int = 2,
        *,
        shared: bool = False,
        check: BeforeUpdate | None = None,
    ) -> None:
        self.step = train_step(algorithm())
        self.checkpoints = Checkpoints(directory, "r", "p", 2, Ranks.single())
        self.link = link
        self.loop = TrainingLoop(
            step=self.step,
            link=link,
            publisher=DigestPublisher(self.step),
            checkpoints=self.checkpoints,
            ranks=Ranks.single(),
            device=DeviceTurns(self.step, link, Ranks.single(), directory) if shared else None,
            num_steps=STEPS,
            checkpoint_every=checkpoint_every,
            gate=None if check is None else SimpleNamespace(check=check, left=1),
        )

    def live(self) -> int:
        start = self.checkpoints.restore(self.step.model, self.step.optimizer)
        try:
            return self.loop.run(self.loop.recover(start, max(self.link.ledger, default=-1)))
        except KeyboardInterrupt:  # a thread ends with its process; here the next life would meet it
            self.checkpoints.finish()
            raise


@pytest.fixture(autouse=True)
def no_pause_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "COMMAND_POLL_S", 0.001)


def test_every_version_is_published_once_and_in_order(tmp_path: Path) -> None:
    link = FakeLink()
    assert Trainer(tmp_path, link).live() == STEPS
    assert link.published == [0, 1, 2, 3, 4, 5]
    assert link.pulls == [1, 2, 3, 4, 5]
    assert link.checkpoint_steps == [0, 2, 4, 5]
    assert link.kept == [[], [2], [2, 4], [4, 5]], "recorded batches are kept after the oldest"
    assert len(set(link.ledger.values())) == 6
    assert {"step_seconds", "tokens_per_second", "waited_s"} <= link.gauges.keys()


def test_a_checkpoint_that_is_asked_for_does_not_wait_for_the_next_batch(tmp_path: Path) -> None:
    """A trainer of a run that ends early gets no other message until the command to leave."""

    class Waiting(FakeLink):
        def pull(self, training_step: int) -> RankBatch | None:
            if training_step < 4:
                return super().pull(training_step)
            self.pulls.append(training_step)
            self.checkpoint = self.pulls.count(4) in (1, 3)  # the second request asks for a newer checkpoint
            self.stopped = self.pulls.count(4) == 4
            return None

    link = Waiting()
    assert Trainer(tmp_path, link).live() == 3
    assert link.kept == [[], [2], [2, 3]]
    assert link.states[-5:] == ["checkpointing", *["waiting for a batch"] * 3, "checkpointing"]


def test_a_refused_batch_is_neither_trained_nor_published_and_replayed_ones_are_not_checked(tmp_path: Path) -> None:
    seen: list[int] = []

    def check(batch: RankBatch, *_: object) -> None:
        seen.append(batch.training_step)
        if batch.training_step == 4:
            raise MismatchError("likely cause: rope base")

    link = FakeLink()
    trainer = Trainer(tmp_path, link, checkpoint_every=9, check=check)
    assert trainer.live() == 3
    assert link.published == [0, 1, 2, 3] and link.refusals == ["likely cause: rope base"]
    assert link.states.count("paused") == 1 and link.kept[-1] == [3]
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    again = FakeLink(ledger=link.ledger)
    Trainer(tmp_path, again, check=check).live()
    assert seen == [1, 2, 3, 4, 4] and again.pulls == [1, 2, 3, 4]


def test_a_recovered_trainer_replays_without_publishing_and_offers_the_newest_again(tmp_path: Path) -> None:
    """Invariant 6: replayed versions are bit-equal and are not published; only the newest is offered again."""
    whole = FakeLink()
    Trainer(tmp_path / "whole", whole).live()

    def dies(link: FakeLink, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    first = FakeLink(before_pull=dies)
    with pytest.raises(KeyboardInterrupt):
        Trainer(tmp_path / "cut", first).live()  # checkpoint 2, version 3 published
    second = FakeLink(ledger=first.ledger)
    assert Trainer(tmp_path / "cut", second).live() == STEPS
    assert second.pulls == [3, 4, 5]
    assert second.published == [3, 4, 5]
    assert second.ledger == whole.ledger
    assert second.states[:2] == ["replaying", "publishing"]


def test_a_newest_version_that_comes_out_otherwise_does_not_end_the_run(tmp_path: Path) -> None:
    link = FakeLink(ledger={0: "from another machine"})
    assert Trainer(tmp_path, link).live() == STEPS
    assert link.published == [0, 1, 2, 3, 4, 5]


def test_a_checkpoint_from_another_history_is_refused(tmp_path: Path) -> None:
    Trainer(tmp_path, FakeLink()).live()
    with pytest.raises(ModelMismatchError, match="checkpoint of step 5 is ahead of the ledger"):
        Trainer(tmp_path, FakeLink()).live()


def test_a_recorded_batch_that_is_lost_is_passed_over_while_replaying(tmp_path: Path) -> None:
    class Losing(FakeLink):
        def pull(self, training_step: int) -> RankBatch | None:
            if training_step == 2:
                self.pulls.append(training_step)
                raise BatchLostError("the batch of step 2 of model0 is not in the journal")
            return super().pull(training_step)

    link = Losing()
    trainer = Trainer(tmp_path, link)
    assert trainer.loop.recover(0, 3) == 3
    assert link.pulls == [1, 2, 3]
    assert link.gauges["steps_not_replayed"] == 1
    assert link.published == [3]
    with pytest.raises(BatchLostError):  # of a step that was never published, nothing may be left out
        trainer.loop.run(1)


# --- turns on a shared device ---------------------------------------------------------------------------------------------


def turns_of(link: FakeLink, numbers: dict[int, bool]) -> Callable[[FakeLink, int], None]:
    """Sends these turns, one with each call for a batch; a batch comes only in an own turn, as from the orchestrator."""
    waiting = dict(numbers)

    def before_pull(link: FakeLink, step: int) -> None:
        if waiting:
            number = min(waiting)
            link.device_turn = DeviceTurn(number, waiting.pop(number))

    return before_pull


def test_a_trainer_frees_its_memory_between_two_steps_and_trains_the_same_bits(tmp_path: Path) -> None:
    expected = FakeLink()
    Trainer(tmp_path / "apart", expected).live()
    link = FakeLink()
    link.before_pull = turns_of(link, {7: False, 8: True, 9: False, 10: True})
    (tmp_path / "shared").mkdir()
    trainer = Trainer(tmp_path / "shared", link, shared=True)
    assert trainer.live() == STEPS
    assert link.ledger == expected.ledger
    assert link.turns_done == [7, 8, 9, 10]


def test_a_batch_that_comes_without_the_turn_is_not_trained(tmp_path: Path) -> None:
    """The orchestrator has taken the turn while the batch was on its way: the next call gets the same batch."""
    link = FakeLink()
    trainer = Trainer(tmp_path, link, shared=True)
    states: list[bool] = []

    def before_pull(link: FakeLink, step: int) -> None:
        states.append(trainer.loop._device.is_held)
        link.device_turn = DeviceTurn(len(link.pulls), len(link.pulls) % 3 == 0)

    link.before_pull = before_pull
    assert trainer.live() == STEPS
    assert link.published == [0, 1, 2, 3, 4, 5]
    assert False in states, "it asks while another holds the device"
    assert len(link.pulls) > STEPS


def test_a_signal_without_the_turn_leaves_without_a_checkpoint_and_the_next_process_replays(tmp_path: Path) -> None:
    link = FakeLink()

    def before_pull(link: FakeLink, step: int) -> None:
        if step == 3:
            link.device_turn, link.stopped, link.leaving = DeviceTurn(1, False), True, True

    link.before_pull = before_pull
    trainer = Trainer(tmp_path, link, checkpoint_every=100, shared=True)
    assert trainer.live() == 2
    assert trainer.checkpoints.kept() == []
    link.before_pull, link.stopped, link.leaving = lambda link, step: None, False, False
    link.device_turn = DeviceTurn(2, True)
    assert Trainer(tmp_path, link, shared=True).live() == STEPS
    assert link.published == [0, 1, 2, 2, 3, 4, 5]

"""A checkpoint that is written while training goes on: the state of its beginning, durable before it counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer import checkpoints as checkpoints_module
from services.trainer.checkpoints import CheckpointFailedError, Checkpoints
from tests.unit.trainer_service.building import batch_of
from tests.unit.trainer_service.test_checkpoint import assert_same, make_step, open_in, weights
from tests.unit.trainer_service.test_loop import FakeLink, Trainer
from tests.waiting import wait_until


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write back until it is set."""
    opened, write = threading.Event(), Checkpoints.write

    def gated(self: Checkpoints, *arguments: Any) -> None:
        assert opened.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(Checkpoints, "write", gated)
    yield opened
    opened.set()


def test_it_holds_the_state_of_its_beginning_while_training_goes_on(tmp_path: Path, gate: threading.Event) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    step.run(batch_of(1))
    before = weights(step)
    checkpoints.begin(1, step.model, step.optimizer)
    step.run(batch_of(2))
    assert checkpoints.is_writing and not checkpoints.kept(), "it counts when it is durable"
    gate.set()
    checkpoints.finish()
    assert not checkpoints.is_writing
    other = make_step(seed=3)
    assert open_in(tmp_path).restore(other.model, other.optimizer) == 1
    assert_same(before, weights(other))
    assert other.optimizer.num_updates == 2
    other.run(batch_of(2))
    assert_same(weights(step), weights(other))  # the moments, too, are those of its beginning


def test_a_second_one_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    """So there is one copy of the state at most."""
    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.begin(1, step.model, step.optimizer)
    threading.Timer(0.05, gate.set).start()
    checkpoints.begin(2, step.model, step.optimizer)
    assert 1 in checkpoints.kept()
    checkpoints.save(3, step.model, step.optimizer)
    assert checkpoints.kept() == [2, 3] and not checkpoints.is_writing
    checkpoints.begin(3, step.model, step.optimizer)  # exists
    checkpoints.finish()


def test_a_failure_is_raised_where_the_loop_waits_and_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.save(1, step.model, step.optimizer)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    checkpoints.begin(2, step.model, step.optimizer)
    with pytest.raises(CheckpointFailedError, match=r"writing a checkpoint: .*No space left on device"):
        checkpoints.finish()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    checkpoints.begin(2, step.model, step.optimizer)
    checkpoints.finish()
    assert checkpoints.kept()[-1] == 2


def test_a_host_without_memory_for_a_copy_writes_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    monkeypatch.setattr(checkpoints_module, "available_bytes", lambda: 1000)
    told: list[int] = []
    checkpoints.begin(1, step.model, step.optimizer, lambda: told.append(1))
    assert checkpoints.kept() == told == [1] and not checkpoints.is_writing


def test_a_checkpoint_is_reported_when_it_is_durable_and_not_before(tmp_path: Path, gate: threading.Event) -> None:
    """The orchestrator drops recorded batches that no checkpoint needs."""
    seen: list[tuple[int, list[int]]] = []

    class Opening(FakeLink):
        def pull(self, training_step: int) -> Any:
            if training_step == 4:
                gate.set()
            seen.append((training_step, self.kept[-1]))
            return super().pull(training_step)

    link = Opening()
    assert Trainer(tmp_path, link).live() == 5
    assert seen[:4] == [(1, []), (2, []), (3, []), (4, [])], "step 2 is copied and not yet written"
    assert link.kept == [[], [2], [2, 4], [4, 5]]


def test_a_failure_in_the_background_is_counted_and_the_next_step_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tried = Checkpoints.write, []

    def fails_at_first(self: Checkpoints, step: int, contents: Any) -> None:
        tried.append(step)
        if step == 2:
            raise CheckpointFailedError("no free disk")
        write(self, step, contents)

    monkeypatch.setattr(Checkpoints, "write", fails_at_first)
    trainer = Trainer(tmp_path, link := FakeLink())
    join = type(trainer.checkpoints).begin

    def waits(self: Checkpoints, *arguments: Any) -> None:  # so that the outcome is there at the next step
        join(self, *arguments)
        wait_until(lambda: not self.is_writing)

    monkeypatch.setattr(Checkpoints, "begin", waits)
    assert trainer.live() == 5
    assert tried == [2, 3, 4, 5] and link.gauges["failed_checkpoints"] == 1
    assert link.checkpoint_steps == [0, 3, 4, 5]

"""Damage of any byte of a checkpoint is detected, logged and set aside; the previous checkpoint is loaded; no code runs."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.common import checkpoints as names
from services.common.checkpoints import MANIFEST, REASON, CheckpointGauge, _digest, is_set_aside
from services.common.errors import BatchLostError, InfrastructureError
from services.common.records import RankBatch
from services.trainer.checkpoints import Checkpoints, DamagedCheckpointError
from services.trainer.loop import CannotReplayError
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer_service.building import batch_of
from tests.unit.trainer_service.test_checkpoint import IDENTITY, assert_same, make_step, open_in, weights
from tests.unit.trainer_service.test_loop import STEPS, FakeLink, Trainer

FILES = ("manifest.json", "weights_00000.safetensors", "optimizer_00000.safetensors", "model/config.json")
MODEL_FILES = {"config.json": b'{"dtype": "float32"}'}


def checkpoints_in(directory: Path) -> Checkpoints:
    return Checkpoints(directory, *IDENTITY, 2, Ranks.single(), MODEL_FILES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two checkpoints, and the weights of the older."""
    directory = tmp_path_factory.mktemp("saved")
    step, checkpoints = make_step(), checkpoints_in(directory)
    step.run(batch_of(1))
    checkpoints.save(1, step.model, step.optimizer)
    older = weights(step)
    step.run(batch_of(2))
    checkpoints.save(2, step.model, step.optimizer)
    return directory, older


@pytest.fixture
def copied(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def restored(directory: Path) -> tuple[int, TrainStep, list[str]]:
    step = make_step(seed=7)
    checkpoints = checkpoints_in(directory)
    return checkpoints.restore(step.model, step.optimizer), step, checkpoints.set_aside()


def assert_falls_back(directory: Path, older: dict[str, Any], word: str) -> None:
    begun, step, damaged = restored(directory)
    assert begun == 1
    assert_same(weights(step), older)
    assert step.optimizer.num_updates == 2
    ((of, aside),) = [place for place in names.checkpoints_in(directory) if is_set_aside(place[1])]
    assert of == 2 and aside.name == "step_000002.damaged"
    assert word in (aside / REASON).read_text() and word in damaged[0]
    assert restored(directory)[0] == 1, "it is set aside once and for all"


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_in_any_file_is_found(file: str, copied: Path) -> None:
    path = copied / "step_000002" / file
    whole = path.read_bytes()
    step = make_step()
    before = weights(step)
    for number in range(60):
        place = number * (len(whole) - 1) // 59
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << number % 8)]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=file):
            open_in(copied).load(2, step.model, step.optimizer)
    assert_same(before, weights(step))
    path.write_bytes(whole)
    open_in(copied).load(2, step.model, step.optimizer)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_or_longer_or_replaced_file_leads_to_the_checkpoint_before(
    file: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    def longer(path: Path) -> None:
        path.write_bytes(path.read_bytes() + b"\0")

    def linked(path: Path) -> None:
        path.unlink()
        path.symlink_to("/dev/zero")  # which has no end

    def piped(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)  # which nobody will ever write to

    def directory(path: Path) -> None:
        path.unlink()
        path.mkdir()

    harms: tuple[Callable[[Path], None], ...] = (lambda path: path.unlink(), longer, linked, piped, directory)
    for number, harm in enumerate(harms):
        copied = Path(shutil.copytree(saved[0], tmp_path / str(number)))
        harm(copied / "step_000002" / file)
        assert_falls_back(copied, saved[1], file)


class Payload:
    """Runs a command on unpickling."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("file", [*FILES, ".metadata", "random_state_0.bin", "__0_0.distcp", "pytorch_model.bin"])
def test_a_pickle_in_place_of_any_file_is_never_executed(
    file: str, copied: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    pickled = pickle.dumps(Payload(mark))
    assert b"touch" in pickled
    (copied / "step_000002" / file).write_bytes(pickled)
    if file in FILES:
        assert_falls_back(copied, saved[1], file)
    else:
        assert restored(copied)[0] == 2, "a file that the manifest does not name is not read"
    assert not mark.exists()


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replaces the manifest by a forged one with a correct digest."""
    content = orjson.loads((path / MANIFEST).read_bytes())["content"]
    change(content)
    (path / MANIFEST).write_bytes(orjson.dumps({"content": content, "digest": _digest(content)}))


def _file(content: dict[str, Any], **changes: Any) -> None:
    content["files"][0].update(changes)


FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a name outside the directory": lambda c: _file(c, name="../step_000001/weights_00000.safetensors"),
    "an absolute name": lambda c: _file(c, name="/etc/passwd"),
    "a part behind the end": lambda c: c["files"][0]["parts"][0].update(offset_bytes=1 << 40),
    "a part before the begin": lambda c: c["files"][0]["parts"][0].update(offset_bytes=-8),
    "parts that leave a hole": lambda c: c["files"][0]["parts"].pop(),
    "parts that overlap": lambda c: c["files"][0]["parts"].append(c["files"][0]["parts"][0]),
    "a part of no tensor": lambda c: c["files"][0]["parts"][0].update(tensor="weights/none"),
    "no element type": lambda c: next(iter(c["tensors"].values())).update(dtype="object"),
    "a shape of words": lambda c: next(iter(c["tensors"].values())).update(shape=["many"]),
    "a count that is none": lambda c: c.update(num_updates=True),
    "no digest": lambda c: _file(c, digest="md5:00"),
    "another format": lambda c: c.update(format=1),
    "a list": lambda c: c.update(files={"a": 1}),
    "another step": lambda c: c.update(training_step=1),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_damage(name: str, copied: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    forge(copied / "step_000002", FORGED[name])
    assert_falls_back(copied, saved[1], MANIFEST)


def test_of_several_damaged_ones_the_newest_whole_one_is_taken(copied: Path) -> None:
    shutil.copytree(copied / "step_000002", copied / "step_000009")  # its manifest is that of step 2
    (copied / "step_000002" / "weights_00000.safetensors").unlink()
    begun, _, damaged = restored(copied)
    assert begun == 1
    assert [text.partition(" ")[0] for text in damaged] == ["step_000002.damaged:", "step_000009.damaged:"]


def test_without_a_whole_one_the_initial_model_is_left_as_it_was(copied: Path) -> None:
    for number in (1, 2):
        (copied / f"step_00000{number}" / "optimizer_00000.safetensors").write_bytes(b"")
    begun, step, damaged = restored(copied)
    assert begun == 0 and len(damaged) == 2
    assert_same(weights(step), weights(make_step(seed=7)))
    assert step.optimizer.num_updates == 0
    assert not any(state["step"] for state in step.optimizer.adamw.state.values())


def test_a_file_that_may_not_be_read_is_no_damage(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without permission, or too many open files: the medium is intact, so no checkpoint is renamed."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    step = make_step()
    with pytest.raises(InfrastructureError, match="Permission denied"):
        checkpoints_in(copied).restore(step.model, step.optimizer)
    assert not any(is_set_aside(path) for _, path in names.checkpoints_in(copied))


@pytest.mark.parametrize("name", ["step_000001", "step_000000.partial", "step_000000.removed"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_links_and_files_among_checkpoints_stop_no_save_and_are_not_followed(
    name: str, kind: str, copied: Path, tmp_path: Path
) -> None:
    """Such as a checkpoint that was moved to another disk and linked."""
    elsewhere = Path(shutil.copytree(copied / "step_000001", tmp_path / "other disk" / "step_000001"))
    if (copied / name).exists():
        shutil.rmtree(copied / name)
    if kind == "file":
        (copied / name).write_text("notes")
    else:
        (copied / name).symlink_to(elsewhere if kind == "link" else tmp_path / "nothing")
    step = make_step()
    for number in (3, 4, 5):
        checkpoints_in(copied).save(number, step.model, step.optimizer)
    assert checkpoints_in(copied).kept() == [4, 5]
    left = {path.name for path in copied.iterdir()}
    assert left == {"step_000004", "step_000005", *([name] if name == "step_000001" and kind != "link" else [])}
    assert sorted(os.listdir(elsewhere)) == sorted(os.listdir(copied / "step_000005")), "what it points to is not ours"


# -- the loop from there on ----------------------------------------------------------------------------------------------


def dies_at(number: int) -> Callable[[FakeLink, int], None]:
    def die(link: FakeLink, step: int) -> None:
        if step == number:
            raise KeyboardInterrupt

    return die


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The trainer replays from the one before, publishes only the newest again, and reports the kept checkpoints."""
    undisturbed = FakeLink()
    Trainer(tmp_path / "undisturbed", undisturbed).live()
    first = FakeLink(before_pull=dies_at(5))
    with pytest.raises(KeyboardInterrupt):
        Trainer(tmp_path / "run", first).live()  # checkpoints 2 and 4
    (tmp_path / "run" / "step_000004" / "optimizer_00000.safetensors").write_bytes(b"none")

    second = FakeLink(ledger=first.ledger)
    assert Trainer(tmp_path / "run", second).live() == STEPS
    assert second.pulls == [3, 4, 5]
    assert second.ledger == undisturbed.ledger
    assert second.gauges[CheckpointGauge.DAMAGED] == 1
    assert second.kept == [[2], [2, 5]]


def test_batches_that_the_journal_has_lost_are_refused_with_a_remedy(tmp_path: Path) -> None:
    first = FakeLink(before_pull=dies_at(5))
    with pytest.raises(KeyboardInterrupt):
        Trainer(tmp_path, first).live()
    (tmp_path / "step_000004" / MANIFEST).unlink()

    class Forgetful(FakeLink):
        def pull(self, training_step: int) -> RankBatch | None:
            raise BatchLostError(f"the batch of step {training_step} of p lacks trajectories g3")

    with pytest.raises(CannotReplayError) as refused:
        Trainer(tmp_path, Forgetful(ledger=first.ledger)).live()
    assert "the run is at step 4; its newer checkpoints are damaged" in refused.value.message
    assert "To continue from the checkpoint of step 2, the trainer needs the batch of step 3" in refused.value.message
    assert "step_000004.damaged: " in refused.value.message
    assert "rollmill checkpoints RUN" in refused.value.message and "rollmill export RUN" in refused.value.message

    # Whoever accepts the loss says so by removing them.
    for path in tmp_path.glob("*.damaged"):
        shutil.rmtree(path)

    class WithoutThatStep(FakeLink):
        def pull(self, training_step: int) -> RankBatch | None:
            if training_step <= 4:
                raise BatchLostError(f"the batch of step {training_step} of p lacks trajectories g3")
            return super().pull(training_step)

    resumed = Trainer(tmp_path, WithoutThatStep(ledger=first.ledger))
    assert resumed.live() == STEPS

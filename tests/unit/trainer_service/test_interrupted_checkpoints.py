"""A save that is cut short at any operation on files: earlier checkpoints stay usable, remaining files are ignored and
swept."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from services.common.system.child import module_command, run_and_leave
from services.trainer.checkpoints import Checkpoints
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer_service.test_checkpoint import IDENTITY, assert_same, make_step, weights
from tests.unit.trainer_service.test_damaged_checkpoints import checkpoints_in

OPERATIONS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")  # of a save and of a removal
CUTS_S = 200.0  # a process for each cut


@contextmanager
def cut_at(number: int, then: Callable[[], None], beneath: Path) -> Iterator[list[str]]:
    """Replace one operation on files below a directory, by its number, with ``then``; yields the operations so far."""
    done: list[str] = []
    originals = {name: getattr(os, name) for name in OPERATIONS}
    fds: set[int] = set()

    def wrapped(name: str) -> Callable[..., Any]:
        def operate(target: Any, *arguments: Any, **options: Any) -> Any:
            if target not in fds and not str(target).startswith(str(beneath)) and "dir_fd" not in options:
                return originals[name](target, *arguments, **options)
            done.append(name)
            if len(done) == number + 1:
                then()
            result = originals[name](target, *arguments, **options)
            if name == "open":
                fds.add(result)
            elif name == "close":
                fds.discard(target)
            return result

        return operate

    for name in OPERATIONS:
        setattr(os, name, wrapped(name))
    try:
        yield done
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def assert_usable(directory: Path, other: TrainStep, saved: dict[str, Any]) -> int:
    """A checkpoint under its final name is whole; the next save sweeps the rest."""
    checkpoints = checkpoints_in(directory)
    for parameter in other.model.parameters():
        parameter.data.zero_()
    begun = checkpoints.restore(other.model, other.optimizer)
    assert begun in (2, 3) and checkpoints.set_aside() == []
    assert_same(saved, weights(other))
    assert 2 in checkpoints.kept(), "the one before is there until the new one is durable, and after it"
    checkpoints.save(4, other.model, other.optimizer)
    assert sorted(path.name for path in directory.iterdir()) == [f"step_{begun:06d}", "step_000004"]
    return begun


def cut_everywhere(tmp_path: Path, how: Callable[[int, Path], bool]) -> list[int]:
    """The step of the usable checkpoint after each cut, until a save succeeds."""
    begun = []
    step, other = make_step(), make_step()
    for number in (1, 2):  # 3 is about to be saved, after which 1 is removed
        checkpoints_in(tmp_path / "before").save(number, step.model, step.optimizer)
    for number in range(500):
        directory = Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        finished = how(number, directory)
        begun.append(assert_usable(directory, other, weights(step)))
        if finished:
            return begun
    raise AssertionError("a save has no end")


def test_everything_is_durable_before_the_checkpoint_has_its_name(tmp_path: Path) -> None:
    """A power cut leaves synced files only, so every file and directory is synced, before and after the rename."""
    step = make_step()
    checkpoints_in(tmp_path / "run" / "checkpoints" / "p").save(1, step.model, step.optimizer)
    opened: dict[int, str] = {}
    unsynced: set[str] = set()
    order: list[str] = []
    originals = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir")}

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        fd = int(originals["open"](path, flags, *rest, **options))
        opened[fd] = str(path)
        if flags & os.O_CREAT:
            unsynced.update({str(path), str(Path(path).parent)})
        return fd

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        originals["mkdir"](path, *rest, **options)
        unsynced.update({str(path), str(Path(path).parent)})

    def write(fd: int, data: Any) -> int:
        unsynced.add(opened[fd])
        return int(originals["write"](fd, data))

    def fsync(fd: int) -> None:
        originals["fsync"](fd)
        unsynced.discard(opened[fd])
        order.append(opened[fd])

    def rename(source: Any, target: Any) -> None:
        if str(target).endswith("step_000002"):
            left = {path for path in unsynced if path.startswith(str(source))}
            assert left == set(), f"not durable: {left}"
            assert str(order[-1]) == str(source) and order[-2].endswith("manifest.json"), (
                "the manifest is the last file"
            )
            unsynced.add(str(Path(target).parent))
        elif str(source).endswith("step_000001"):
            assert unsynced == set(), "nothing older goes before the new one's name is durable"
        originals["rename"](source, target)

    with pytest.MonkeyPatch.context() as patch:
        for name, replaced in (
            ("open", open_),
            ("write", write),
            ("fsync", fsync),
            ("rename", rename),
            ("mkdir", mkdir),
        ):
            patch.setattr(os, name, replaced)
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints" / "p", *IDENTITY, 1, Ranks.single())
        checkpoints.save(2, step.model, step.optimizer)
    assert checkpoints.kept() == [2]


def steps_of_cuts(forks: ForkServer, module: str, folder: Path) -> list[int]:
    """Run ``main`` of a module of this package in a forked process; returns the step that each cut left to start from."""
    output = folder / "output"
    command = module_command(f"tests.unit.trainer_service.{module}", str(folder))
    process = forks.start(command, os.environ, output)
    assert process is not None, "the fork server has ended"
    assert process.wait(CUTS_S) == 0, output.read_text()
    return [int(word) for word in output.read_text().split()[-1].split(",")]


@pytest.mark.slow
def test_kill_9_at_any_operation_of_a_save_leaves_a_checkpoint_to_start_from(tmp_path: Path, forks: ForkServer) -> None:
    begun = steps_of_cuts(forks, "test_interrupted_checkpoints", tmp_path)
    assert begun[0] == 2 and begun[-1] == 3 and len(begun) > 40


def main() -> int:
    """Fork a process for each cut, kill the process there, and print the step from which each directory starts."""
    import signal
    import warnings

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    warnings.simplefilter("ignore")
    step = make_step()

    def save(number: int, directory: Path) -> bool:
        child = os.fork()
        if not child:
            with cut_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL), directory):
                checkpoints_in(directory).save(3, step.model, step.optimizer)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        return os.waitstatus_to_exitcode(status) == 0

    sys.stdout.write(",".join(map(str, cut_everywhere(Path(sys.argv[1]), save))) + "\n")
    return 0


if __name__ == "__main__":
    run_and_leave(main)

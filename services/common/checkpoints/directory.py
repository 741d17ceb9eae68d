"""The checkpoints of one policy in one directory, by name. Reads and renames directories; opens manifests only.

step_000010              complete: renamed to this name after its whole content was durable
step_000010.partial      unfinished, in progress or left by a dead process; the next save sweeps these
step_000010.removed      being removed, because newer checkpoints exist; swept too
step_000010.damaged      set aside because its content differs from the written one; never swept
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from services.common.checkpoints.files import Progress, read_whole, verify_file
from services.common.checkpoints.manifest import MANIFEST, Manifest, StoredFile, decode
from services.common.errors import CorruptDataError
from services.common.system.disk import sync_directory

PREFIX = "step_"
PARTIAL = ".partial"
REMOVED = ".removed"
DAMAGED = ".damaged"
REASON = "why_damaged.txt"


def checkpoints_directory(run_dir: Path, policy: str) -> Path:
    """The directory of a policy's checkpoints in a run directory."""
    return run_dir / "checkpoints" / policy


def path_of(directory: Path, step: int) -> Path:
    return directory / f"{PREFIX}{step:06d}"


def steps(directory: Path) -> list[int]:
    """The training steps of complete checkpoints, ascending. They may be damaged."""
    names = (path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*") if path.is_dir())
    return sorted(step for name in names if name.isdecimal() and name == f"{(step := int(name)):06d}")


def set_aside_before(directory: Path) -> list[tuple[int, Path]]:
    """(training step, directory) of the damaged checkpoints that were set aside, in order."""
    found = []
    for path in directory.glob(f"{PREFIX}*{DAMAGED}*"):
        number = path.name.removeprefix(PREFIX).partition(".")[0]
        if number.isdecimal() and path.is_dir():
            found.append((int(number), path))
    return sorted(found)


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        CorruptDataError: the manifest is missing or damaged.
    """
    manifest = decode(read_whole(path / MANIFEST))
    if path.name.partition(".")[0] != path_of(path.parent, manifest.training_step).name:
        raise CorruptDataError(f"{MANIFEST} is that of step {manifest.training_step}, not of {path.name}")
    return manifest


def find_damage(path: Path, files: list[StoredFile], progress: Progress = lambda _: None) -> str:
    """Describe the damaged files of a checkpoint; empty when all are intact.

    Raises ``OSError`` where a file may not be read.
    """
    found = []
    for file in files:
        try:
            verify_file(path, file, progress)
        except CorruptDataError as error:
            found.append(error.message)
    return "; ".join(found)


def set_aside(path: Path, reason: str) -> Path:
    """Rename a damaged checkpoint, with the reason beside its files; returns its new place."""
    target = path.with_name(f"{path.name}{DAMAGED}")
    for number in range(2, 1000):
        if not target.exists():
            break
        target = path.with_name(f"{path.name}{DAMAGED}-{number}")
    os.rename(path, target)
    sync_directory(path.parent)
    with contextlib.suppress(OSError):  # a full disk, say: the log has the reason, too
        (target / REASON).write_text(f"{reason}\n", encoding="utf-8")
    return target


def reason_of(path: Path) -> str:
    """Why a checkpoint was set aside."""
    try:
        return read_whole(path / REASON)[:4096].decode(errors="replace").strip()
    except CorruptDataError:
        return f"{REASON} is missing"


def remove(path: Path) -> None:
    """Remove a checkpoint. A partly removed checkpoint does not count as complete."""
    doomed = path.with_name(f"{path.name}{REMOVED}")
    os.rename(path, doomed)
    with contextlib.suppress(OSError):  # swept by the next save
        sweep(doomed)


def sweep(path: Path) -> None:
    """Remove a result of ``leftovers``; only the link, if the path is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def leftovers(directory: Path) -> Iterator[Path]:
    """Files of unfinished saves and removals of dead processes."""
    for suffix in (PARTIAL, REMOVED):
        yield from directory.glob(f"{PREFIX}*{suffix}")

"""The files that a task's sandbox starts with, and those of its tests: path, mode and content, bounded.

Links are copied as links, so no file outside of the task's directory is ever read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from services.common.errors import DatasetError
from services.common.harbor.dockerfile import Copy
from services.common.harbor.places import TESTS
from services.common.harbor.task import HarborTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One entry; ``content`` is None for a directory and the target for a link."""

    place: PurePosixPath
    kind: str  # "file", "link" or "directory"
    mode: int = 0o755
    content: bytes = b""


def environment_files(task: HarborTask, most_bytes: int) -> list[TaskFile]:
    """The working directory and the files that COPY and ADD bring.

    Raises:
        DatasetError: a source that does not exist, or more than ``most_bytes``.
    """
    context = task.directory / "environment"
    found = [TaskFile(place=task.dockerfile.workdir, kind="directory")]
    for copy in task.dockerfile.copies:
        found += _copied(task.name, context, copy)
    return _bounded(task.name, found, most_bytes)


def verifier_files(task: HarborTask, most_bytes: int) -> list[TaskFile]:
    """The directory ``tests``, for the end of an episode."""
    return _bounded(task.name, _tree(task.directory / "tests", PurePosixPath(TESTS)), most_bytes)


def _copied(name: str, context: Path, copy: Copy) -> Iterator[TaskFile]:
    for pattern in copy.sources:
        relative = pattern.strip("/")
        sources = [context] if relative in ("", ".") else sorted(context.glob(relative))
        if not sources:
            raise DatasetError(f"task {name}: Dockerfile line {copy.line}: there is no {pattern} in environment")
        for source in sources:
            if not source.resolve().is_relative_to(context.resolve()):
                raise DatasetError(f"task {name}: Dockerfile line {copy.line}: {pattern} leads out of environment")
            is_tree = source.is_dir() and not source.is_symlink()
            into = (copy.into or len(sources) > 1) and not is_tree
            yield from _tree(source, copy.place / source.name if into else copy.place)


def _tree(top: Path, place: PurePosixPath) -> Iterator[TaskFile]:
    try:
        mode = os.lstat(top).st_mode
        if stat.S_ISLNK(mode):
            yield TaskFile(place=place, kind="link", content=os.fsencode(os.readlink(top)))
        elif stat.S_ISDIR(mode):
            yield TaskFile(place=place, kind="directory", mode=stat.S_IMODE(mode) | 0o700)
            for path in sorted(top.iterdir()):
                yield from _tree(path, place / path.name)
        elif stat.S_ISREG(mode):
            yield TaskFile(place=place, kind="file", mode=stat.S_IMODE(mode) | 0o600, content=top.read_bytes())
    except OSError as error:
        raise DatasetError(f"{top} cannot be read: {error.strerror}") from error


def _bounded(name: str, files: Iterable[TaskFile], most_bytes: int) -> list[TaskFile]:
    """Stops at the file that passes the bound; the files before it are not kept by anyone else."""
    found, total = [], 0
    for file in files:
        total += len(file.content)
        if total > most_bytes:
            raise DatasetError(
                f"task {name}: its files are larger than {most_bytes} bytes: raise envgateway.harbor.files_bytes"
            )
        found.append(file)
    return found

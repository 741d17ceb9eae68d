"""Writes one checkpoint: every rank its rows, durable and read back before the directory gets its name.

    every rank writes its files, fsync -> all read back -> manifest, fsync -> rename -> remove the oldest

The parts to write may be the live tensors or copies of them: in the second case training goes on meanwhile
(``Checkpoints.begin``), and nothing here touches the model.
"""

from __future__ import annotations

import contextvars
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.checkpoints import directory as names
from services.common.checkpoints.files import write_bytes, write_safetensors
from services.common.checkpoints.manifest import MANIFEST, MODEL_FILES, Manifest, StoredFile, encode, file_from_json
from services.common.errors import CorruptDataError, DeadlineError, InfrastructureError, RollmillError
from services.common.system.disk import sync_directory
from services.trainer.checkpoint.state import LAYOUT, Contents
from services.trainer.ranks.sharding import HostGroup, Ranks

log = structlog.get_logger()

# Timeout of an exchange in which a slow disk may delay one rank.
DISK_TIMEOUT_S = 1800.0


class BackgroundWrite:
    """Starts ``work`` at once; ``finish`` waits for its end and raises its ``RollmillError``.

    A daemon thread: a process that ends does not wait for the thread. The thread then leaves the same files as a killed
    process, and the next save sweeps these files.
    """

    def __init__(self, training_step: int, work: Callable[[], None], timeout_s: float) -> None:
        self.training_step = training_step
        self._work = work
        self._timeout_s = timeout_s
        self._failure: RollmillError | None = None
        self._is_done = False
        context = contextvars.copy_context()  # run and policy, for the log
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), daemon=True, name=f"checkpoint-{training_step}"
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end. Raises ``DeadlineError``, or the error of the work."""
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            wait = f"writing the checkpoint of step {self.training_step}"
            raise DeadlineError(f"{wait} took longer than {self._timeout_s:g} s: is the disk still there?", wait=wait)
        if self._failure is not None:
            raise self._failure
        if not self._is_done:  # a bug, which the thread has printed
            raise RuntimeError(
                f"the thread that wrote the checkpoint of step {self.training_step} has ended with an error"
            )

    def _run(self) -> None:
        try:
            self._work()
        except RollmillError as failure:
            self._failure = failure
        else:
            self._is_done = True


class CheckpointFailedError(InfrastructureError):
    """The disk refused a checkpoint; earlier ones stay, and a later attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """The run, policy and model of a checkpoint."""

    run_id: str
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWriter:
    """Writes checkpoints of one policy into one directory, and keeps the newest ``keep``. Every method is a collective."""

    directory: Path
    identity: CheckpointIdentity
    keep: int
    ranks: Ranks
    hosts: HostGroup
    model_files: Mapping[str, bytes]

    def write(self, training_step: int, contents: Contents) -> None:
        """Write, verify and name the checkpoint of a step, then remove the oldest ones.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no space, or no permission.
        """
        target = names.path_of(self.directory, training_step)
        partial = target.with_name(f"{target.name}{names.PARTIAL}")
        began = time.monotonic()
        try:
            self.agree("preparing a checkpoint", lambda: self._prepare(partial, contents))
            written = self.agree("writing a checkpoint", lambda: self._write(partial, contents))
            files = [file_from_json(entry) for text in written for entry in json.loads(text)]
            # Read back before an older checkpoint is removed: the disk may have lost data.
            self.agree("reading a checkpoint back", lambda: self._damage_found(partial, files))
            self.agree(
                "completing a checkpoint", lambda: self._complete(partial, target, files, training_step, contents)
            )
        except CheckpointFailedError:
            if self.ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        size = sum(file.size_bytes for file in files)
        seconds = round(time.monotonic() - began, 3)
        log.info("checkpoint.saved", step=training_step, path=str(target), bytes=size, seconds=seconds)

    def _prepare(self, partial: Path, contents: Contents) -> str:
        if self.ranks.is_first:
            for left_over in names.leftovers(self.directory):  # a process died during the write
                names.sweep(left_over)
            partial.mkdir(parents=True)
            needed = contents.size_bytes_of_all_ranks
            free = shutil.disk_usage(partial).free
            if free < needed:
                raise OSError(f"no free disk: it needs about {needed} bytes, {free} are free")
        return ""

    def _write(self, partial: Path, contents: Contents) -> str:
        """Write this rank's files; returns their description as JSON."""
        rank = self.ranks.rank
        of_run = {"format": "pt", "run_id": self.identity.run_id, "policy": self.identity.policy}
        files = [
            write_safetensors(partial / name, name, pieces, of_run)
            for name, pieces in (
                (f"weights_{rank:05d}.safetensors", contents.weights),
                (f"optimizer_{rank:05d}.safetensors", contents.optimizer),
            )
        ]
        if self.ranks.is_first:
            for name, data in self.model_files.items():
                path = partial / MODEL_FILES / name
                path.parent.mkdir(parents=True, exist_ok=True)
                files.append(write_bytes(path, f"{MODEL_FILES}{name}", data))
                sync_directory(path.parent)
        return json.dumps([file.to_json() for file in files])

    def _damage_found(self, partial: Path, files: list[StoredFile]) -> str:
        if damage := names.find_damage(partial, shares(files, self.ranks.world_size)[self.ranks.rank]):
            raise OSError(f"the disk has not kept the written bytes: {damage}")
        return ""

    def _complete(
        self, partial: Path, target: Path, files: list[StoredFile], training_step: int, contents: Contents
    ) -> str:
        if not self.ranks.is_first:
            return ""
        manifest = Manifest(
            run_id=self.identity.run_id,
            policy=self.identity.policy,
            training_step=training_step,
            num_updates=contents.num_updates,
            num_ranks=self.ranks.world_size,
            optimizer=LAYOUT,
            written_at=int(time.time()),
            tensors=contents.tensors,
            files=tuple(files),
            adapter=contents.adapter,
        )
        write_bytes(partial / MANIFEST, MANIFEST, encode(manifest))
        sync_directory(partial)
        self._compare(partial, manifest)
        os.rename(partial, target)
        for parent in (self.directory, *list(self.directory.parents)[:2]):  # the directories that the run created
            sync_directory(parent)
        for step in names.steps(self.directory)[: -self.keep]:
            try:
                names.remove(names.path_of(self.directory, step))
            except OSError as error:  # the new checkpoint is complete; only an old one remains
                log.warning("checkpoint.not_removed", step=step, error=str(error))
        return ""

    @staticmethod
    def _compare(partial: Path, manifest: Manifest) -> None:
        try:
            found = names.read_manifest(partial)
        except CorruptDataError as error:
            raise OSError(f"the disk has not kept the written bytes: {error.message}") from None
        if found != manifest:
            raise OSError(f"the disk has not kept the written bytes: {MANIFEST} differs")

    def agree(
        self, what: str, work: Callable[[], str], error: type[RollmillError] = CheckpointFailedError
    ) -> list[str]:
        """Run ``work`` on every rank; raise ``error`` on all of them when one fails."""
        try:
            return self.hosts.agree(what, work, error)
        except OSError as failure:  # a single rank has no other rank to inform
            raise error(f"{self.directory}: {what}: {failure}") from failure


def shares(files: tuple[StoredFile, ...] | list[StoredFile], num_ranks: int) -> list[list[StoredFile]]:
    """The files that each rank reads, with about the same number of bytes for each."""
    shares: list[list[StoredFile]] = [[] for _ in range(num_ranks)]
    for file in sorted(files, key=lambda each: (-each.size_bytes, each.name)):
        min(shares, key=lambda share: sum(each.size_bytes for each in share)).append(file)
    return shares

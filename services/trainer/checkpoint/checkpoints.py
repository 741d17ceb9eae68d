"""Writes and restores durable checkpoints: weights, optimizer state, update number, random state, training step.

    save     every rank writes its rows, and waits (``writing``)
    begin    every rank copies its rows to host memory, and a thread writes them while training goes on -> finish
    restore  newest -> manifest -> all ranks verify the files against their digests -> rows into memory
                 damaged: log, rename with the reason, take the previous one

Invariant: a directory gets its name ``step_000010`` after its whole content is durable, and an older checkpoint is removed
only after that; so a process that dies at any moment leaves a complete checkpoint. Reading never executes code: files
are safetensors and JSON. Ranks agree on each fact that they could observe differently. The learning rate is a function
of the update number, so there is no further scheduler state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common.checkpoints import directory as names
from services.common.checkpoints.files import TensorReader
from services.common.checkpoints.manifest import RANDOM_STATE, WEIGHTS, Manifest
from services.common.errors import ConfigError, CorruptDataError, InfrastructureError, ModelMismatchError
from services.common.system.memory import available_bytes
from services.common.telemetry.log_events import LogEvent
from services.common.weights.snapshot import check_same_adapter
from services.trainer.checkpoint import state
from services.trainer.checkpoint.writing import (
    DISK_TIMEOUT_S,
    BackgroundWrite,
    CheckpointFailedError,
    CheckpointIdentity,
    CheckpointWriter,
    shares,
)
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks.sharding import HostGroup, Ranks

log = structlog.get_logger()

ROOM = 1.25  # of the bytes of a copy; training and snapshots need memory meanwhile

__all__ = ["CheckpointFailedError", "CheckpointIdentity", "Checkpoints", "DamagedCheckpointError"]


class DamagedCheckpointError(CorruptDataError):
    """A checkpoint differs from the written one; the message names the file and the difference."""


class Checkpoints:
    """The checkpoints of one policy in one directory. The constructor is a collective.

    ``model_files`` are config and tokenizer by name. Every checkpoint holds them beside the weights, so that an export
    needs no other directory.
    """

    def __init__(
        self,
        directory: Path,
        identity: CheckpointIdentity,
        keep: int,
        ranks: Ranks,
        model_files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._ranks = ranks
        self._hosts = HostGroup(ranks, DISK_TIMEOUT_S)
        self._writer = CheckpointWriter(
            directory=directory, identity=identity, keep=keep, ranks=ranks, hosts=self._hosts, model_files=model_files
        )
        self._writing: BackgroundWrite | None = None

    def kept(self) -> list[int]:
        """The training steps of the complete checkpoints, ascending."""
        return names.steps(self._directory)

    def path(self, training_step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return names.path_of(self._directory, training_step)

    def newest(self) -> int | None:
        """The training step of the newest complete checkpoint."""
        return max(self.kept(), default=None)

    def before(self, training_step: int) -> int | None:
        """The newest checkpoint from which ``training_step`` can be trained again."""
        return max((step for step in self.kept() if step < training_step), default=None)

    def set_aside(self, after: int = 0) -> list[str]:
        """Names of the damaged checkpoints of steps after ``after`` that were set aside, each with the reason."""
        return [
            f"{path.name}: {names.reason_of(path)}"
            for step, path in names.set_aside_before(self._directory)
            if step > after
        ]

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Write a checkpoint and remove the oldest ones. A collective; returns at once when the checkpoint exists.

        Waits for one that is being written. Raises the errors of ``finish``.
        """
        self.finish()
        if not self._exists(training_step):
            self._writer.write(training_step, state.contents(model, optimizer, self._ranks))

    def begin(
        self,
        training_step: int,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        on_durable: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy this rank's part to host memory, and write the checkpoint while training goes on. A collective.

        Waits for one that is being written, so that there is one copy at most. The checkpoint counts when it is durable and
        has its name; then ``on_durable`` is called, in the thread. If a host lacks memory for the copies of its ranks, this works
        as ``save`` does. Raises the errors of ``finish``.
        """
        self.finish()
        if self._exists(training_step):
            on_durable()
            return
        began = time.monotonic()
        live = state.contents(model, optimizer, self._ranks)
        if not self._have_room(live.size_bytes):
            self._writer.write(training_step, live)
            on_durable()
            return
        copied = state.contents(model, optimizer, self._ranks, copied=True)
        seconds = round(time.monotonic() - began, 3)
        log.info("checkpoint.begun", step=training_step, bytes=copied.size_bytes, pause_s=seconds)

        def write() -> None:
            self._writer.write(training_step, copied)
            on_durable()

        # Four exchanges of a writer.
        self._writing = BackgroundWrite(training_step, write, 4 * DISK_TIMEOUT_S)

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._writing is not None and self._writing.is_running

    def finish(self) -> int | None:
        """Wait for the checkpoint that is being written; returns its training step, None without one. A collective.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no space, or no permission.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        writing.finish()
        return writing.training_step

    def _exists(self, training_step: int) -> bool:
        """The first rank's answer, on every rank."""
        answer = str(self._ranks.is_first and self.path(training_step).exists())
        return self._hosts.gather(answer, "asking the first rank for a checkpoint")[0] == str(True)

    def _have_room(self, size_bytes: int) -> bool:
        """Whether every host has memory for the copies of its ranks."""
        needed = int(size_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * ROOM)
        available = available_bytes()
        room = self._hosts.gather(str(needed <= available), "asking for the memory of a copy")
        if str(False) in room:
            log.warning("checkpoint.not_copied", needed_bytes=needed, available_bytes=available)
        return str(False) not in room

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, model: PolicyModel, optimizer: PolicyOptimizer) -> int:
        """Load the newest undamaged checkpoint; returns its training step, 0 without one. A collective.

        A damaged checkpoint is logged and set aside with the reason, and the previous one is tried. Weights stay
        unchanged when none is left.

        Raises:
            ModelMismatchError: the newest belongs to another run, policy or model; the message names the difference.
        """
        while step := int(self._hosts.gather(str(self.newest() or 0), "choosing a checkpoint")[0]):
            try:
                self.load(step, model, optimizer)
            except DamagedCheckpointError as error:
                self._set_aside(step, error.message)
            else:
                return step
        return 0

    def load(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Verify a checkpoint, then restore weights, moments, update number and random state. A collective.

        Raises, on every rank alike:
            DamagedCheckpointError: the checkpoint differs from the written one. The model stays unchanged.
            ModelMismatchError: the checkpoint belongs to another run, policy or model; the message names the difference.
        """
        path = self.path(training_step)
        began = time.monotonic()
        found: dict[str, Manifest] = {}

        def read() -> str:
            try:
                found["manifest"] = names.read_manifest(path)
            except CorruptDataError as error:
                return error.message
            return ""

        self._refuse_damaged(path, self._writer.agree("reading a checkpoint's manifest", read, ConfigError))
        manifest = found["manifest"]
        self._writer.agree(
            "checking whose checkpoint it is", lambda: self._check(path, manifest, model, optimizer), ModelMismatchError
        )
        own = shares(manifest.files, self._ranks.world_size)[self._ranks.rank]
        self._refuse_damaged(
            path,
            self._writer.agree("verifying a checkpoint", lambda: names.find_damage(path, own), InfrastructureError),
        )
        verified = time.monotonic()
        with TensorReader(path, manifest) as reader:
            state.restore(model, optimizer, reader, manifest.tensors)
            state.restore_random_state(reader, self._ranks, manifest.tensors)
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.num_updates = manifest.num_updates
        log.info(
            LogEvent.CHECKPOINT_LOADED,
            step=training_step,
            path=str(path),
            bytes=manifest.size_bytes,
            verify_s=round(verified - began, 3),
            read_s=round(time.monotonic() - verified, 3),
        )

    def _refuse_damaged(self, path: Path, results: list[str]) -> None:
        damage = "; ".join(dict.fromkeys(text for text in results if text))
        if damage:
            raise DamagedCheckpointError(f"{path} is damaged: {damage}")

    def _set_aside(self, training_step: int, reason: str) -> None:
        path = self.path(training_step)
        moved = self._writer.agree(
            "setting a damaged checkpoint aside",
            lambda: names.set_aside(path, reason).name if self._ranks.is_first else "",
            ConfigError,
        )[0]
        log.error(LogEvent.CHECKPOINT_DAMAGED, step=training_step, reason=reason, set_aside_as=moved)

    def _check(self, path: Path, manifest: Manifest, model: PolicyModel, optimizer: PolicyOptimizer) -> str:
        for key, mine in (("run_id", self._identity.run_id), ("policy", self._identity.policy)):
            if getattr(manifest, key) != mine:
                raise ModelMismatchError(
                    f"{path} belongs to {key} {getattr(manifest, key)!r}, not to {mine!r}: remove it, or use another "
                    "run directory"
                )
        check_same_adapter(model.adapter, manifest.adapter, f"{path} (remove it, or use another run directory)")
        stored = manifest.tensors
        own = state.expected(model, optimizer, stored)
        generator = next(iter(state.describe(state.random_state(self._ranks)).values()))
        own |= {
            name: generator for name in stored if name.startswith(RANDOM_STATE)
        }  # the writer may have had any number of ranks
        wrong = [name for name in sorted({*stored, *own}) if stored.get(name) != own.get(name)]
        if wrong:
            first = next((name for name in wrong if name.startswith(WEIGHTS)), wrong[0])
            raise ModelMismatchError(
                f"{path} is a checkpoint of another model: {first.removeprefix(WEIGHTS)} is {stored.get(first, 'missing')} there and "
                f"{own.get(first, 'missing')} here ({len(wrong)} tensors differ): remove it, or use another run directory"
            )
        return ""

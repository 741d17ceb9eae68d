"""Durable checkpoints: weights, optimizer state, update number, random state, training step.

    save     every rank writes its rows, fsync -> all read back -> manifest, fsync -> rename -> the oldest are removed
    restore  newest -> manifest -> all files against their digests, by all ranks together -> rows into memory
                 damaged: named, set aside, the one before

Invariant: a directory ``step_000010`` came under its name after everything in it was durable, and an older checkpoint goes
only after that; so a process that dies at any moment leaves one to start from. Nothing that is read is executed: files
are safetensors and JSON. Ranks agree on everything that one of them could see otherwise. The learning rate is a function
of the update number, so there is no further scheduler state.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common.checkpoints import directory as names
from services.common.checkpoints.files import TensorReader, write_bytes, write_safetensors
from services.common.checkpoints.manifest import (
    MANIFEST,
    MODEL_FILES,
    RANDOM_STATE,
    WEIGHTS,
    Manifest,
    StoredFile,
    encode,
    file_from_json,
)
from services.common.disk import sync_directory
from services.common.errors import ConfigError, CorruptDataError, InfrastructureError, MillraceError, ModelMismatchError
from services.trainer import checkpoint_state as state
from services.trainer.host_group import HostGroup
from services.trainer.model import PolicyModel
from services.trainer.optimizer import PolicyOptimizer
from services.trainer.sharding import Ranks

log = structlog.get_logger()

# Of an exchange in which one rank may still write or read what others have done: disks differ.
DISK_TIMEOUT_S = 1800.0
_STATES_PER_WEIGHT = 3  # the weight and AdamW's two moments


class CheckpointFailedError(InfrastructureError):
    """The disk did not take a checkpoint; earlier ones stay, and a later try may succeed."""


class DamagedCheckpointError(CorruptDataError):
    """A checkpoint is not what was written; the message says which file, and what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """What a checkpoint belongs to."""

    run_id: str
    policy: str


class Checkpoints:
    """The checkpoints of one policy in one directory. Making one is a collective.

    ``model_files`` are config and tokenizer by name, which every checkpoint holds beside the weights, so that it can be
    exported wherever it lies.
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
        self._keep = keep
        self._ranks = ranks
        self._model_files = model_files
        self._hosts = HostGroup(ranks, DISK_TIMEOUT_S)

    def kept(self) -> list[int]:
        """The training steps of the complete checkpoints, ascending."""
        return names.steps(self._directory)

    def path(self, training_step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return names.path_of(self._directory, training_step)

    def newest(self) -> int | None:
        """The training step of the newest complete checkpoint."""
        return max(self.kept(), default=None)

    def before(self, training_step: int) -> int | None:
        """The newest checkpoint from which ``training_step`` can be trained again."""
        return max((step for step in self.kept() if step < training_step), default=None)

    def set_aside(self, after: int = 0) -> list[str]:
        """Names of the damaged checkpoints of later steps than ``after`` that were set aside, each with the reason."""
        return [
            f"{path.name}: {names.reason_of(path)}"
            for step, path in names.set_aside_before(self._directory)
            if step > after
        ]

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Write a checkpoint and remove the oldest ones. A collective; does nothing when it is there already.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no room, or no right to.
        """
        target = self.path(training_step)
        partial = target.with_name(f"{target.name}{names.PARTIAL}")
        began = time.monotonic()
        if self._first_says(lambda: target.exists()):
            return
        try:
            self._agree("preparing a checkpoint", lambda: self._prepare(partial, model))
            told = self._agree("writing a checkpoint", lambda: self._write(partial, model, optimizer))
            files = [file_from_json(entry) for text in told for entry in json.loads(text)]
            # What a disk has taken and not kept shows before anything older goes.
            self._agree("reading a checkpoint back", lambda: self._damage_found(partial, files))
            self._agree(
                "completing a checkpoint",
                lambda: self._complete(partial, target, files, training_step, model, optimizer),
            )
        except CheckpointFailedError:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        size = sum(file.size_bytes for file in files)
        seconds = round(time.monotonic() - began, 3)
        log.info("checkpoint.saved", step=training_step, path=str(target), bytes=size, seconds=seconds)

    def _prepare(self, partial: Path, model: PolicyModel) -> str:
        if self._ranks.is_first:
            for left_over in names.leftovers(self._directory):  # a process died while writing it
                names.sweep(left_over)
            partial.mkdir(parents=True)
            needed = _STATES_PER_WEIGHT * sum(p.numel() * p.element_size() for p in model.parameters())
            free = shutil.disk_usage(partial).free
            if free < needed:
                raise OSError(f"no free disk: it needs about {needed} bytes, {free} are free")
        return ""

    def _write(self, partial: Path, model: PolicyModel, optimizer: PolicyOptimizer) -> str:
        """This rank's files, told as JSON."""
        rank = self._ranks.rank
        of_run = {"format": "pt", "run_id": self._identity.run_id, "policy": self._identity.policy}
        moments = state.moments_of(model, optimizer)
        files = []
        for name, parts in (
            (f"weights_{rank:05d}.safetensors", state.pieces(state.weights_of(model), self._ranks)),
            (
                f"optimizer_{rank:05d}.safetensors",
                [*state.pieces(moments, self._ranks), *state.own_pieces(state.random_state(self._ranks))],
            ),
        ):
            files.append(write_safetensors(partial / name, name, parts, of_run))
        if self._ranks.is_first:
            for name, data in self._model_files.items():
                path = partial / MODEL_FILES / name
                path.parent.mkdir(parents=True, exist_ok=True)
                files.append(write_bytes(path, f"{MODEL_FILES}{name}", data))
                sync_directory(path.parent)
        return json.dumps([file.to_json() for file in files])

    def _damage_found(self, partial: Path, files: list[StoredFile]) -> str:
        if damage := names.find_damage(partial, _shares(files, self._ranks.world_size)[self._ranks.rank]):
            raise OSError(f"the disk has not kept what was written: {damage}")
        return ""

    def _complete(
        self, partial: Path, target: Path, files: list[StoredFile], training_step: int, model: PolicyModel,
        optimizer: PolicyOptimizer,
    ) -> str:  # fmt: skip
        if not self._ranks.is_first:
            return ""
        tensors = state.describe({**state.weights_of(model), **state.moments_of(model, optimizer)})
        generator = state.describe(state.random_state(self._ranks))[f"{RANDOM_STATE}0"]
        tensors |= {f"{RANDOM_STATE}{rank}": generator for rank in range(self._ranks.world_size)}
        manifest = Manifest(
            run_id=self._identity.run_id,
            policy=self._identity.policy,
            training_step=training_step,
            num_updates=optimizer.num_updates,
            num_ranks=self._ranks.world_size,
            optimizer=state.LAYOUT,
            written_at=int(time.time()),
            tensors=tensors,
            files=tuple(files),
        )
        write_bytes(partial / MANIFEST, MANIFEST, encode(manifest))
        sync_directory(partial)
        self._compare(partial, manifest)
        os.rename(partial, target)
        for parent in (self._directory, *list(self._directory.parents)[:2]):  # those that the run has made
            sync_directory(parent)
        for step in self.kept()[: -self._keep]:
            try:
                names.remove(self.path(step))
            except OSError as error:  # the new one is there all the same
                log.warning("checkpoint.not_removed", step=step, error=str(error))
        return ""

    @staticmethod
    def _compare(partial: Path, manifest: Manifest) -> None:
        try:
            found = names.read_manifest(partial)
        except CorruptDataError as error:
            raise OSError(f"the disk has not kept what was written: {error.message}") from None
        if found != manifest:
            raise OSError(f"the disk has not kept what was written: {MANIFEST} differs")

    def _agree(
        self, what: str, work: Callable[[], str], error: type[MillraceError] = CheckpointFailedError
    ) -> list[str]:
        """Do something on every rank, and fail on all of them with ``error`` when it fails on one."""
        try:
            return self._hosts.agree(what, work, error)
        except OSError as failure:  # of a single rank, which has nobody to tell
            raise error(f"{self._directory}: {what}: {failure}") from failure

    def _first_says(self, question: Callable[[], bool]) -> bool:
        """The first rank's answer, on every rank."""
        return self._hosts.gather(str(self._ranks.is_first and question()), "asking the first rank")[0] == str(True)

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, model: PolicyModel, optimizer: PolicyOptimizer) -> int:
        """Load the newest checkpoint that is whole; returns its training step, 0 when there is none. A collective.

        A damaged one is named in the log, renamed with the reason in it, and the one before is taken. Weights are
        untouched when there is none left.

        Raises:
            ModelMismatchError: the newest is of another run, policy or model; the message says what differs.
            ConfigError: the newest was written by an earlier version.
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
            DamagedCheckpointError: it is not what was written. Nothing is changed.
            ModelMismatchError: it is of another run, policy or model; the message says what differs.
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

        self._refuse_damaged(path, self._agree("reading a checkpoint's manifest", read, ConfigError))
        manifest = found["manifest"]
        self._agree(
            "checking whose checkpoint it is", lambda: self._check(path, manifest, model, optimizer), ModelMismatchError
        )
        own = _shares(manifest.files, self._ranks.world_size)[self._ranks.rank]
        self._refuse_damaged(
            path, self._agree("verifying a checkpoint", lambda: names.find_damage(path, own), InfrastructureError)
        )
        verified = time.monotonic()
        with TensorReader(path, manifest) as reader:
            state.restore(model, optimizer, reader, manifest.tensors)
            state.restore_random_state(reader, self._ranks, manifest.tensors)
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.num_updates = manifest.num_updates
        log.info(
            "checkpoint.loaded",
            step=training_step,
            path=str(path),
            bytes=manifest.size_bytes,
            verify_s=round(verified - began, 3),
            read_s=round(time.monotonic() - verified, 3),
        )

    def _refuse_damaged(self, path: Path, told: list[str]) -> None:
        damage = "; ".join(dict.fromkeys(text for text in told if text))
        if damage:
            raise DamagedCheckpointError(f"{path} is damaged: {damage}")

    def _set_aside(self, training_step: int, reason: str) -> None:
        path = self.path(training_step)
        moved = self._agree(
            "setting a damaged checkpoint aside",
            lambda: names.set_aside(path, reason).name if self._ranks.is_first else "",
            ConfigError,
        )[0]
        log.error("checkpoint.damaged", step=training_step, reason=reason, set_aside_as=moved)

    def _check(self, path: Path, manifest: Manifest, model: PolicyModel, optimizer: PolicyOptimizer) -> str:
        for key, mine in (("run_id", self._identity.run_id), ("policy", self._identity.policy)):
            if getattr(manifest, key) != mine:
                raise ModelMismatchError(
                    f"{path} belongs to {key} {getattr(manifest, key)!r}, not to {mine!r}: remove it, or use another "
                    "run directory"
                )
        stored = manifest.tensors
        own = state.expected(model, optimizer, stored)
        generator = next(iter(state.describe(state.random_state(self._ranks)).values()))
        own |= {name: generator for name in stored if name.startswith(RANDOM_STATE)}  # of any number of ranks
        wrong = [name for name in sorted({*stored, *own}) if stored.get(name) != own.get(name)]
        if wrong:
            first = next((name for name in wrong if name.startswith(WEIGHTS)), wrong[0])
            raise ModelMismatchError(
                f"{path} is a checkpoint of another model: {first.removeprefix(WEIGHTS)} is {stored.get(first, 'missing')} there and "
                f"{own.get(first, 'missing')} here ({len(wrong)} tensors differ): remove it, or use another run directory"
            )
        return ""


def _shares(files: tuple[StoredFile, ...] | list[StoredFile], num_ranks: int) -> list[list[StoredFile]]:
    """Which rank reads which files, so that each reads about as many bytes."""
    shares: list[list[StoredFile]] = [[] for _ in range(num_ranks)]
    for file in sorted(files, key=lambda each: (-each.size_bytes, each.name)):
        min(shares, key=lambda share: sum(each.size_bytes for each in share)).append(file)
    return shares

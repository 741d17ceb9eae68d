"""Durable checkpoints: weights, optimizer state, update number, random state, training step.

A checkpoint is a directory ``step_000010`` that appears under its name only when it is complete (written beside it,
then renamed), so the newest directory is always one to start from. Written by every rank with
``torch.distributed.checkpoint``; any number of ranks can read it back. The learning rate is a function of the update
number, so there is no further scheduler state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from services.common.errors import CorruptDataError, InfrastructureError, ModelMismatchError
from services.trainer.model import PolicyModel
from services.trainer.optimizer import PolicyOptimizer
from services.trainer.sharding import Ranks

log = structlog.get_logger()

META = "millrace.json"
_PREFIX = "step_"
_PARTIAL = ".partial"
_ARCHIVE_WRITER = "inline_container"  # where its errors come from, as they say
_STATES_PER_WEIGHT = 3  # the weight and AdamW's two moments


class CheckpointFailedError(InfrastructureError):
    """The disk did not take a checkpoint; earlier ones stay, and a later try may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """What a checkpoint belongs to."""

    run_id: str
    policy: str


class Checkpoints:
    """The checkpoints of one policy in one directory."""

    def __init__(self, directory: Path, identity: CheckpointIdentity, keep: int, ranks: Ranks) -> None:
        self._directory = directory
        self._identity = identity
        self._keep = keep
        self._ranks = ranks

    def kept(self) -> list[int]:
        """The training steps of the complete checkpoints, ascending."""
        return self._steps()

    def newest(self) -> int | None:
        """The training step of the newest complete checkpoint."""
        return max(self._steps(), default=None)

    def before(self, training_step: int) -> int | None:
        """The newest checkpoint from which ``training_step`` can be trained again."""
        return max((step for step in self._steps() if step < training_step), default=None)

    def save(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Write a checkpoint and remove the oldest ones. A collective; does nothing when it is there already.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no room, or no right to.
        """
        target = self._path(training_step)
        partial = target.with_name(f"{target.name}{_PARTIAL}")
        if self._any(self._ranks.is_first and target.exists()):
            return
        try:
            self._together("prepare", lambda: self._prepare(partial, model))
            self._write(partial, model, optimizer)
            self._together("complete", lambda: self._complete(partial, target, training_step, model, optimizer))
        except CheckpointFailedError:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        log.info("checkpoint.saved", step=training_step, path=str(target))

    def load(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Restore weights, moments, update number and random state. A collective.

        Raises:
            ModelMismatchError: the checkpoint is of another run, policy or model; the message says what differs.
            CorruptDataError: it cannot be read.
        """
        path = self._path(training_step)
        meta = self._read_meta(path)
        self._check(path, meta, model)
        weights, moments = get_state_dict(model, optimizer.adamw)
        try:
            dcp.load({"weights": weights, "moments": moments}, checkpoint_id=path, no_dist=self._alone)
        except CheckpointException as error:
            raise CorruptDataError(
                f"{path} cannot be read: {_reason(error)}; remove it to start from the one before"
            ) from None
        set_state_dict(model, optimizer.adamw, model_state_dict=weights, optim_state_dict=moments)
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.num_updates = int(meta["num_updates"])
        random_state = path / self._random_name()
        if random_state.exists():  # absent for ranks that the writer did not have
            torch.set_rng_state(torch.from_numpy(np.fromfile(random_state, dtype=np.uint8)))
        log.info("checkpoint.loaded", step=training_step, path=str(path))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _prepare(self, partial: Path, model: PolicyModel) -> None:
        if not self._ranks.is_first:
            return
        for left_over in self._directory.glob(f"{_PREFIX}*{_PARTIAL}"):  # a process died while writing it
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)
        needed = _STATES_PER_WEIGHT * sum(p.numel() * p.element_size() for p in model.parameters())
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(f"no free disk: it needs about {needed} bytes, {free} are free")

    def _write(self, partial: Path, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        weights, moments = get_state_dict(model, optimizer.adamw)
        try:
            dcp.save({"weights": weights, "moments": moments}, checkpoint_id=partial, no_dist=self._alone)
        except CheckpointException as error:  # told to every rank; not an Exception, so nothing else would catch it
            if not any(_is_of_the_disk(cause) for cause in _causes(error)):
                raise
            raise CheckpointFailedError(f"{partial}: {_reason(error)}") from None
        self._together(
            "write the random state",
            lambda: torch.get_rng_state().numpy().tofile(partial / self._random_name()),
        )

    def _complete(
        self, partial: Path, target: Path, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer
    ) -> None:
        if not self._ranks.is_first:
            return
        meta = {
            "run_id": self._identity.run_id,
            "policy": self._identity.policy,
            "training_step": training_step,
            "num_updates": optimizer.num_updates,
            "num_ranks": self._ranks.world_size,
            "parameters": _shapes(model),
        }
        (partial / META).write_text(json.dumps(meta, indent=1))
        partial.rename(target)
        for step in self._steps()[: -self._keep]:
            shutil.rmtree(self._path(step), ignore_errors=True)

    def _together(self, what: str, work: Any) -> None:
        """Do something on every rank and fail on all of them when it fails on one."""
        failure: OSError | None = None
        try:
            work()
        except OSError as error:
            failure = error
        if self._any(failure is not None):
            raise CheckpointFailedError(f"{self._directory}: {what}: {failure or 'another rank failed'}") from failure

    def _any(self, here: bool) -> bool:
        return bool(self._ranks.max(torch.tensor(int(here), device=self._ranks.device)))

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_meta(self, path: Path) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = json.loads((path / META).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CorruptDataError(f"{path / META} cannot be read: {error}") from None
        return meta

    def _check(self, path: Path, meta: dict[str, Any], model: PolicyModel) -> None:
        for key, mine in (("run_id", self._identity.run_id), ("policy", self._identity.policy)):
            if meta[key] != mine:
                raise ModelMismatchError(
                    f"{path} belongs to {key} {meta[key]!r}, not to {mine!r}: remove it, or use another run directory"
                )
        stored, own = meta["parameters"], _shapes(model)
        wrong = [name for name in sorted({*stored, *own}) if stored.get(name) != own.get(name)]
        if wrong:
            first = wrong[0]
            raise ModelMismatchError(
                f"{path} is a checkpoint of another model: {first} is {stored.get(first, 'missing')} there and "
                f"{own.get(first, 'missing')} here ({len(wrong)} parameters differ): remove it, or use another run directory"
            )

    def _steps(self) -> list[int]:
        return sorted(
            int(path.name.removeprefix(_PREFIX))
            for path in self._directory.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdigit() and (path / META).exists()
        )

    def _path(self, training_step: int) -> Path:
        return self._directory / f"{_PREFIX}{training_step:06d}"

    def _random_name(self) -> str:
        return f"random_state_{self._ranks.rank}.bin"

    @property
    def _alone(self) -> bool:
        return self._ranks.world_size == 1


def _shapes(model: PolicyModel) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what its ranks raised, and what led to each."""
    yield error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
    led_here = error.__cause__ or error.__context__
    if led_here is not None:
        yield from _causes(led_here)


def _is_of_the_disk(cause: BaseException) -> bool:
    """torch's archive writer tells a disk that became full in mid-file as a ``RuntimeError`` of its own; the ``OSError``
    that led there does not come along from another rank."""
    return isinstance(cause, OSError) or (isinstance(cause, RuntimeError) and _ARCHIVE_WRITER in str(cause))


def _reason(error: CheckpointException) -> str:
    causes = list(_causes(error))
    chosen = next((cause for cause in causes if _is_of_the_disk(cause)), causes[min(1, len(causes) - 1)])
    return f"{type(chosen).__name__}: {chosen}"

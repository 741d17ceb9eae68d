"""Durable checkpoints: weights, optimizer, update number, training step.

A checkpoint is a directory ``step_000010`` that appears under its name only when it is complete (written beside it,
then renamed), so the newest directory is always one to start from. Written by every rank with
``torch.distributed.checkpoint``; any number of ranks can read it back.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from services.common.errors import ModelMismatchError
from services.trainer.model import PolicyModel
from services.trainer.optimizer import PolicyOptimizer
from services.trainer.sharding import Ranks

log = structlog.get_logger()

META = "millrace.json"
_PREFIX = "step_"


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

    def newest(self) -> int | None:
        """The training step of the newest complete checkpoint."""
        steps = self._steps()
        return steps[-1] if steps else None

    def before(self, training_step: int) -> int | None:
        """The newest checkpoint from which ``training_step`` can be trained again."""
        return max((step for step in self._steps() if step < training_step), default=None)

    def save(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Write a checkpoint and remove the oldest ones. A collective.

        Raises:
            OSError: no room, or no right to write; what was begun is removed and older checkpoints stay.
        """
        target = self._path(training_step)
        if target.exists():
            return
        partial = target.with_name(f"{target.name}.partial")
        try:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._meet()
            weights, moments = get_state_dict(model, optimizer.adamw)
            dcp.save({"weights": weights, "moments": moments}, checkpoint_id=partial, no_dist=self._alone)
            if self._ranks.is_first:
                (partial / META).write_text(json.dumps(self._meta(training_step, model, optimizer), indent=1))
                partial.rename(target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._meet()
        if self._ranks.is_first:
            self._retire()
        log.info("checkpoint.saved", step=training_step, path=str(target))

    def load(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Restore weights, moments and update number. A collective.

        Raises:
            ModelMismatchError: the checkpoint is of another run, policy or model; the message says what differs.
        """
        path = self._path(training_step)
        meta = json.loads((path / META).read_text())
        self._check(path, meta, model)
        weights, moments = get_state_dict(model, optimizer.adamw)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=path, no_dist=self._alone)
        set_state_dict(model, optimizer.adamw, model_state_dict=weights, optim_state_dict=moments)
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.num_updates = int(meta["num_updates"])
        log.info("checkpoint.loaded", step=training_step, path=str(path))

    def _meta(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, Any]:
        return {
            "run_id": self._identity.run_id,
            "policy": self._identity.policy,
            "training_step": training_step,
            "num_updates": optimizer.num_updates,
            "parameters": _shapes(model),
        }

    def _check(self, path: Path, meta: dict[str, Any], model: PolicyModel) -> None:
        for key, mine in (("run_id", self._identity.run_id), ("policy", self._identity.policy)):
            if meta[key] != mine:
                raise ModelMismatchError(f"{path} belongs to {key} {meta[key]!r}, not to {mine!r}: remove it or rename the run")
        stored, own = meta["parameters"], _shapes(model)
        wrong = [name for name in sorted({*stored, *own}) if stored.get(name) != own.get(name)]
        if wrong:
            first = wrong[0]
            raise ModelMismatchError(
                f"{path} is a checkpoint of another model: {first} is {stored.get(first, 'missing')} there and "
                f"{own.get(first, 'missing')} here ({len(wrong)} parameters differ)"
            )

    def _steps(self) -> list[int]:
        return sorted(
            int(path.name.removeprefix(_PREFIX))
            for path in self._directory.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdigit() and (path / META).exists()
        )

    def _path(self, training_step: int) -> Path:
        return self._directory / f"{_PREFIX}{training_step:06d}"

    def _retire(self) -> None:
        for step in self._steps()[: -self._keep]:
            shutil.rmtree(self._path(step), ignore_errors=True)

    def _meet(self) -> None:
        self._ranks.sum(torch.zeros(1, device=self._ranks.device))

    @property
    def _alone(self) -> bool:
        return self._ranks.world_size == 1


def _shapes(model: PolicyModel) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}

"""Trains recorded batches again, offline, from the checkpoint before a step, and reports the digest of the result.

On a CPU with the recipe's number of threads and one rank the digest equals the ledger's. ``replay`` accepts any source of
batches; `rollmill replay` reads the journal.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, InvalidRequestError, UnknownPolicyError
from services.common.records import RankBatch
from services.trainer.config import set_defaults

if TYPE_CHECKING:
    from services.trainer.metrics import StepMetrics

BatchOf = Callable[[int], RankBatch]  # the whole batch of a training step, for one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of training a step again."""

    training_step: int
    from_checkpoint: int  # 0: the starting checkpoint
    digest: str  # of the version that the step makes, in publish_dtype
    metrics: StepMetrics

    def report(self, expected: str | None) -> dict[str, object]:
        """The result as JSON; ``equal`` is null without an expected digest."""
        return {
            "training_step": self.training_step,
            "from_checkpoint": self.from_checkpoint,
            "digest": self.digest,
            "ledger_digest": expected,
            "equal": None if expected is None else expected == self.digest,
            "metrics": self.metrics.as_dict(),
        }


def replay(recipe: Recipe, run_dir: Path, policy: str, training_step: int, batch_of: BatchOf) -> Replayed:
    """Train the steps from the newest checkpoint before ``training_step`` up to that step. Leaves no files.

    Raises:
        UnknownPolicyError, InvalidRequestError: no such policy or step.
        ConfigError: the policy is trained by several ranks, whose sums have another order.
    """
    if policy not in recipe.trained_policies:
        raise UnknownPolicyError(
            f"no policy {policy!r} in this run; it has {', '.join(sorted(recipe.trained_policies))}"
        )
    if not 1 <= training_step <= recipe.run.steps:
        raise InvalidRequestError(f"step {training_step}: the steps of this run are 1 to {recipe.run.steps}")
    num_ranks = recipe.policies[policy].trainer.num_ranks
    if num_ranks > 1:
        raise ConfigError(
            f"policy {policy!r} is trained by {num_ranks} ranks: one process cannot repeat their arithmetic"
        )
    set_defaults(os.environ)
    from torch import cuda

    from services.common.system.machine import keep_freed_memory
    from services.trainer.app import build_step, join_ranks, open_checkpoints
    from services.trainer.publish import Snapshots
    from services.trainer.ranks import leave_ranks

    if not cuda.is_available():  # a run of a GPU machine: on a CPU its sums have another order
        tree = recipe.model_dump(mode="json") | {"placement": "apart"}
        tree["policies"][policy]["trainer"] |= {"device": "cpu", "gpus": []}
        recipe = Recipe.model_validate(tree)
    keep_freed_memory()
    ranks = join_ranks(recipe, policy)
    step, _ = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    checkpoints = open_checkpoints(recipe, policy, run_dir, ranks)
    begin = max((step for step in checkpoints.kept() if step < training_step), default=0)
    if begin:
        checkpoints.load(begin, step.model, step.optimizer)
    metrics = step.run(batch_of(begin + 1))
    for later in range(begin + 2, training_step + 1):
        metrics = step.run(batch_of(later))
    with tempfile.TemporaryDirectory(prefix="rollmill-replay-") as directory:  # by the code that publishes
        snapshots = Snapshots(
            step.model,
            ranks,
            run_id=str(recipe.run.id),
            policy=policy,
            dtype=recipe.policies[policy].published_dtype,
            algorithm=recipe.digest_algorithm(),
            directories=(Path(directory),),
        )
        written = snapshots.write(training_step)
        assert written is not None
        digest = written.manifest.digest
    leave_ranks()
    return Replayed(training_step=training_step, from_checkpoint=begin, digest=digest, metrics=metrics)

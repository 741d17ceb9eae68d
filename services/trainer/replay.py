"""Trains recorded batches again, offline, from the checkpoint before a step, and reports the digest of the result.

    python -m services.trainer.replay --run-dir DIR --policy P --step K --orchestrator HOST:PORT [--digest D]

On a CPU with the recipe's number of threads and one rank the digest equals the ledger's. ``replay`` accepts any source of
batches; this command asks a running orchestrator, `rollmill replay` reads the journal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, InvalidRequestError, RollmillError, UnknownPolicyError, UserError
from services.common.records import RankBatch
from services.common.system.child import run_and_leave
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

    if not cuda.is_available():  # a run of a GPU machine: on a CPU its sums have another order
        tree = recipe.model_dump(mode="json") | {"placement": "apart"}
        tree["policies"][policy]["trainer"] |= {"device": "cpu", "gpus": []}
        recipe = Recipe.model_validate(tree)
    keep_freed_memory()
    ranks = join_ranks(recipe, policy)
    step, _ = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    checkpoints = open_checkpoints(recipe, policy, run_dir, ranks)
    begin = checkpoints.before(training_step) or 0
    if begin:
        checkpoints.load(begin, step.model, step.optimizer)
    metrics = step.run(batch_of(begin + 1))
    for later in range(begin + 2, training_step + 1):
        metrics = step.run(batch_of(later))
    digest = _digest(recipe, policy, training_step, step.model, ranks)
    return Replayed(training_step=training_step, from_checkpoint=begin, digest=digest, metrics=metrics)


def _digest(recipe: Recipe, policy: str, version: int, model: object, ranks: object) -> str:
    """The digest of the weights, by the code that publishes: a temporary snapshot."""
    import tempfile

    from services.trainer.publish import Snapshots

    with tempfile.TemporaryDirectory(prefix="rollmill-replay-") as directory:
        written = Snapshots(
            model,  # type: ignore[arg-type]
            ranks,  # type: ignore[arg-type]
            run_id=str(recipe.run.id),
            policy=policy,
            dtype=recipe.policies[policy].published_dtype,
            algorithm=recipe.digest_algorithm(),
            directories=(Path(directory),),
        ).write(version)
        assert written is not None
        return written.manifest.digest


def main() -> int:
    arguments = _parser().parse_args()
    from services.common.config.loading import load_resolved
    from services.common.telemetry.logs import configure

    configure("replay")  # to standard error: standard output has the result
    try:
        recipe = load_resolved(arguments.run_dir)
        with _Orchestrator(arguments.orchestrator, str(recipe.run.id), arguments.policy) as orchestrator:
            replayed = replay(recipe, arguments.run_dir, arguments.policy, arguments.step, orchestrator.batch)
    except RollmillError as error:
        sys.stderr.write(f"replay: {error.message}\n")
        return 2 if isinstance(error, UserError) else 1
    report = replayed.report(arguments.digest)
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if report["equal"] is False else 0


class _Orchestrator:
    """Pulls recorded batches from a running orchestrator, without changing its state."""

    def __init__(self, address: str, run_id: str, policy: str) -> None:
        from services.trainer.link import LoopThread, OrchestratorClient

        async def connect() -> OrchestratorClient:
            return OrchestratorClient(address, run_id, policy, num_ranks=1)

        self._thread = LoopThread("replay-grpc")
        self._client = self._thread.call(connect())
        self._address = address

    def __enter__(self) -> _Orchestrator:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._client.close())
        self._thread.stop()

    def batch(self, training_step: int) -> RankBatch:
        batch = self._thread.call(self._client.pull(training_step, 0))
        if batch is None:
            raise InvalidRequestError(
                f"the orchestrator at {self._address} has no recorded batch of step {training_step}"
            )
        return batch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.replay",
        description="Train a recorded batch again, offline, and print the digest of the weights that come out (JSON). "
        "Exit code 1 when the digest differs from --digest.",
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    parser.add_argument("--policy", required=True, help="the policy, as the recipe names it")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="the training step to train again, from 1")
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT", help="a running orchestrator of this run")
    parser.add_argument("--digest", help="the ledger's digest of version K, to compare with")
    return parser


if __name__ == "__main__":
    run_and_leave(main)

"""``millrace replay``: train a recorded batch again, offline, and compare the weights with the ledger's digest.

Works on a run directory alone: the journal for batches and digests, the checkpoints for where to begin. On a CPU the
arithmetic is bit-exact, so the digests are equal; on a GPU they may differ, and the metrics say how far things are.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.orchestrator.batches import read_batch
from services.orchestrator.journal import records
from services.orchestrator.journal.writer import JournalReader


def replay_step(run_dir: Path, policy: str | None, training_step: int) -> dict[str, Any]:
    """Train steps from the checkpoint before ``training_step`` up to it, on their recorded batches.

    Raises:
        ConfigError: no such policy, or a step that was never published.
        CorruptDataError: a batch that is not in the journal any more (older than the last checkpoint).
    """
    run_dir = run_dir.resolve()
    recipe = load_resolved(run_dir)
    name = _policy(recipe, policy)
    reader = JournalReader(run_dir / "journal")
    try:
        expected = _published_digest(reader, name, training_step)
        return _replay(recipe, run_dir, name, training_step, reader, expected)
    finally:
        reader.close()


def _replay(
    recipe: Recipe, run_dir: Path, policy: str, training_step: int, reader: JournalReader, expected: str
) -> dict[str, Any]:
    import torch

    from services.trainer.app import build_step
    from services.trainer.checkpoint import CheckpointIdentity, Checkpoints
    from services.trainer.loop import flatten
    from services.trainer.sharding import Ranks
    from services.trainer.snapshot import write_snapshot

    config = recipe.policies[policy]
    torch.set_num_threads(config.trainer.threads)
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks.single(device)
    step = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    checkpoints = Checkpoints(
        run_dir / "checkpoints" / policy,
        CheckpointIdentity(run_id=str(recipe.run.id), policy=policy),
        config.trainer.keep_checkpoints,
        ranks,
    )
    begin = checkpoints.before(training_step) or 0
    if begin:
        checkpoints.load(begin, step.model, step.optimizer)
    metrics: dict[str, float] = {}
    for number in range(begin + 1, training_step + 1):
        metrics = flatten(step.run(read_batch(reader, policy, number).share(0, 1)))
    with tempfile.TemporaryDirectory() as scratch:
        written = write_snapshot(
            step.model,
            ranks,
            run_id=str(recipe.run.id),
            policy=policy,
            version=training_step,
            dtype=config.weights.publish_dtype,
            directories=(Path(scratch),),
        )
    assert written is not None
    return {
        "policy": policy,
        "step": training_step,
        "from_checkpoint": begin,
        "digest": written.manifest.digest,
        "ledger_digest": expected,
        "bit_exact": written.manifest.digest == expected,
        "metrics": metrics,
    }


def _policy(recipe: Recipe, policy: str | None) -> str:
    if policy is None and len(recipe.policies) == 1:
        return next(iter(recipe.policies))
    if policy not in recipe.policies:
        raise ConfigError(f"--policy must be one of {', '.join(recipe.policies)}")
    return policy


def _published_digest(reader: JournalReader, policy: str, version: int) -> str:
    for row in reader.rows():
        if row.kind == records.VERSION and (record := reader.load(row)) is not None:
            found, _, _ = records.version_from_json(record)
            if (found.policy, found.number) == (policy, version):
                return found.digest
    raise ConfigError(f"version {version} of {policy} was never published in this run: --step is a finished training step")

"""``rollmill replay``: train a recorded batch again, offline, and compare the weights with the ledger's digest.

Works on a run directory alone: the journal for batches and digests, the checkpoints for where to begin. On a CPU the
arithmetic is bit-exact, so the digests are equal; on a GPU they may differ, and the metrics say how far things are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from services.common import run_files
from services.common.config.reading.loading import load_resolved
from services.common.errors import ConfigError
from services.common.records.types import RankBatch
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.trainer.replay import replay


def replay_step(
    run_dir: Path, policy: str | None, training_step: int, told: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train the steps from the checkpoint before ``training_step`` to ``training_step``, on their recorded batches.

    ``told`` is called with the progress and the result.

    Raises:
        ConfigError: the run has several policies and none was named, or not the one named, or the step was never
        published. CorruptDataError: a batch that is not in the journal any more (older than the last checkpoint).
    """
    run_dir = run_dir.resolve()
    recipe = load_resolved(run_dir)
    trained = list(recipe.trained_policies)
    if policy is None:
        if len(trained) > 1:
            raise ConfigError(f"this run has several policies: write --policy with one of {', '.join(trained)}")
        policy = trained[0]
    elif policy not in trained:
        raise ConfigError(f"this run trains no policy {policy!r}; write one of {', '.join(trained)}")
    name = policy
    with closing(JournalReader(run_files.journal(run_dir))) as reader:
        expected = _published_digest(reader, name, training_step)
        told(f"loading {name} from the checkpoint before step {training_step}")

        def share_of(step: int) -> RankBatch:
            told(f"training step {step} of {training_step} again")
            return read_batch(reader, name, step).share(rank=0, num_ranks=1)

        replayed = replay(recipe, run_dir, name, training_step, share_of)
    equal = "the same weights as" if replayed.digest == expected else "other weights than"
    told(f"step {training_step} of {name}: {equal} the published version")
    return replayed.report(expected)


def _published_digest(reader: JournalReader, policy: str, version: int) -> str:
    for row in reader.rows():
        if row.kind == records.VERSION and (record := reader.load(row)) is not None:
            found, _, _ = records.version_from_json(record)
            if (found.policy, found.number) == (policy, version):
                return found.digest
    raise ConfigError(
        f"version {version} of {policy} was never published in this run: --step is a finished training step"
    )

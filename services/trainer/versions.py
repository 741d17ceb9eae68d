"""Makes versions of one policy: a snapshot file, told to the publisher process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.config.policy import PolicyConfig
from services.common.types import WeightVersion
from services.common.weights.snapshot_file import DEFAULT_DIRECTORIES, sweep_orphans
from services.trainer.model import PolicyModel
from services.trainer.publisher_process import PublisherProcess
from services.trainer.sharding import Ranks
from services.trainer.snapshot import write_snapshot

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class SnapshotPublisher:
    """The loop's ``Publisher``. Only the first rank has a publisher process."""

    run_id: str
    policy: str
    config: PolicyConfig
    run_dir: Path
    model: PolicyModel
    ranks: Ranks
    process: PublisherProcess | None

    def publish(self, version: int) -> WeightVersion | None:
        written = write_snapshot(
            self.model,
            self.ranks,
            run_id=self.run_id,
            policy=self.policy,
            version=version,
            dtype=self.config.weights.publish_dtype,
            directories=(*DEFAULT_DIRECTORIES, spill_directory(self.run_dir)),
        )
        if written is None or self.process is None:
            return None
        self.process.announce(written.path)
        return WeightVersion(
            policy=self.policy, number=version, digest=written.manifest.digest, sources=(self.process.address,)
        )


def spill_directory(run_dir: Path) -> Path:
    """Where snapshots go when shared memory is full."""
    return run_dir / "snapshots"


def sweep(run_dir: Path) -> None:
    """Remove snapshots whose writer was killed."""
    spill_directory(run_dir).mkdir(parents=True, exist_ok=True)
    for removed in sweep_orphans((*DEFAULT_DIRECTORIES, spill_directory(run_dir))):
        log.info("snapshot.orphan_removed", path=str(removed))

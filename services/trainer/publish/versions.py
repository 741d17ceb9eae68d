"""Publishes versions of one policy: writes a snapshot file and announces the file to the publisher process.

Files of other processes may fill shared memory and the spill directory for a while: the trainer waits for space, and
keeps its training state.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.config.training.policy import WeightsConfig
from services.common.records.types import WeightVersion
from services.common.telemetry.log_events import LogEvent
from services.common.weights.snapshot_file import DEFAULT_DIRECTORIES, SnapshotSpaceError, sweep_orphans
from services.trainer.loop.training_loop import Published
from services.trainer.publish.publisher_process import PublisherProcess
from services.trainer.publish.snapshot import Snapshots, WrittenSnapshot

log = structlog.get_logger()

ROOM_LOOKS = 120  # attempts; counted and not timed, because all ranks must give up at the same one
ROOM_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class SnapshotPublisher:
    """The loop's ``Publisher``. Only the first rank has a publisher process."""

    policy: str
    snapshots: Snapshots
    process: PublisherProcess | None

    def publish(self, version: int) -> Published | None:
        """Write and announce a version; None except on the first rank. A collective.

        Raises, on every rank alike:
            SnapshotSpaceError: no space for ten minutes.
        """
        written = self._write_when_there_is_room(version)
        if written is None or self.process is None:
            return None
        self.process.announce(written.path)
        digest = written.manifest.digest
        return Published(
            version=WeightVersion(policy=self.policy, number=version, digest=digest, sources=(self.process.address,)),
            metrics={
                "snapshot_s": written.copy_s,
                "snapshot_digest_s": written.digest_s,
                "snapshot_bytes": float(written.manifest.size_bytes),
            },
        )

    def _write_when_there_is_room(self, version: int) -> WrittenSnapshot | None:
        for look in range(ROOM_LOOKS):
            try:
                written = self.snapshots.write(version)
            except SnapshotSpaceError as error:
                if not look:
                    log.error("snapshot.no_room", version=version, error=error.message, retry_s=ROOM_EVERY_S)
                time.sleep(ROOM_EVERY_S)
            else:
                if look:
                    log.info("snapshot.room_again", version=version)
                return written
        return self.snapshots.write(version)


def snapshot_directories(config: WeightsConfig, run_dir: Path) -> tuple[Path, ...]:
    """The directories of snapshots, in order of preference: shared memory, then the spill directory."""
    spill = Path(config.spill_directory) if config.spill_directory is not None else run_dir / "snapshots"
    return (*DEFAULT_DIRECTORIES, spill)


def sweep(directories: Iterable[Path]) -> None:
    """Create the directories, and remove the snapshots of killed writers from them."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        for removed in sweep_orphans([directory]):
            log.info(LogEvent.SNAPSHOT_ORPHAN_REMOVED, path=str(removed))

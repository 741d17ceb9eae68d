"""Publishes versions of one policy: writes the current weights into a snapshot file, and announces the file.

Weights are cast from the master weights, tied ones once. The only place where torch tensors become published bytes. Ranks of one host map one file and each writes its own rows,
without communication:

    first rank reserves the file | all: its name | every rank copies its rows | every rank digests a share of the tensors
    | first rank seals

Ranks on several hosts cannot map one file: there the first rank gathers one whole tensor at a time and writes alone.
Either way ``write`` succeeds or fails on all ranks alike, and only a complete file is visible. The trainer blocks for the
copy and the digests; the publisher process serves the file.

Files of other processes may fill shared memory and the spill directory for a while: the trainer waits for space, and
keeps its training state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog
import torch

from services.common.config.training import WeightsConfig
from services.common.net.hosts import host_identity
from services.common.records import WeightVersion
from services.common.telemetry.logs import LogEvent
from services.common.weights.snapshot import (
    DEFAULT_ALGORITHM,
    DEFAULT_DIRECTORIES,
    DigestAlgorithm,
    Manifest,
    SnapshotPart,
    SnapshotSpaceError,
    SnapshotWriter,
    TensorEntry,
    TensorSpec,
    sweep_orphans,
)
from services.trainer.loop import Published
from services.trainer.model.policy_model import PolicyModel
from services.trainer.publisher_process import PublisherProcess
from services.trainer.ranks import HostGroup, Ranks, own_part, whole_tensors

log = structlog.get_logger()

_STAGED_BYTES = 16 << 20  # of each pinned buffer
_LANDING_THREADS = 4  # the first write to a page of the file takes longer than its copy, and threads share that

ROOM_LOOKS = 120  # attempts; counted and not timed, because all ranks must give up at the same one
ROOM_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSnapshot:
    """A sealed snapshot file, and the time until every rank was done."""

    path: Path
    manifest: Manifest
    copy_s: float  # reserving the file, casting and copying
    digest_s: float


class Snapshots:
    """Writes snapshots of one policy's model. The constructor and ``write`` are collectives."""

    def __init__(
        self,
        model: PolicyModel,
        ranks: Ranks,
        *,
        run_id: str,
        policy: str,
        dtype: str,
        algorithm: DigestAlgorithm = DEFAULT_ALGORITHM,
        directories: Sequence[Path] = DEFAULT_DIRECTORIES,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._run_id = run_id
        self._policy = policy
        self._dtype = dtype
        self._kind: torch.dtype = getattr(torch, dtype)
        self._algorithm = algorithm
        self._directories = directories
        self._copier = HostCopier(ranks.device)
        self._hosts = HostGroup(ranks)
        identities = self._hosts.gather(host_identity(), "learning which hosts the ranks are on")
        self.is_one_host = ranks.world_size == 1 or (len(set(identities)) == 1 and identities[0] != "")

    def write(self, version: int) -> WrittenSnapshot | None:
        """Write and seal a version; None except on the first rank.

        Raises, on every rank alike:
            SnapshotSpaceError: no directory has enough space.
            InfrastructureError: a rank could not write its part.
            DeadlineError: a rank did not join.
        """
        began = time.monotonic()
        writer: SnapshotWriter | None = None  # on the first rank
        part: SnapshotPart | None = None  # on the others of one host

        def reserve() -> str:
            nonlocal writer
            if not self._ranks.is_first:
                return ""
            writer = SnapshotWriter.create(
                run_id=self._run_id,
                policy=self._policy,
                version=version,
                specs=[
                    TensorSpec(name=name, dtype=self._dtype, shape=tuple(weight.shape))
                    for name, weight in self._model.published().items()
                ],
                directories=self._directories,
                algorithm=self._algorithm,
                adapter=self._model.adapter,
            )
            return str(writer.path)

        def copy() -> str:
            nonlocal part
            part = writer if writer is not None else SnapshotPart.join(Path(paths[0]))
            self._copier.copy(self._own_rows(part))
            return ""

        def digest() -> str:
            assert part is not None
            mine = _share(part.tensors, self._ranks)
            return orjson.dumps(part.digests(mine, torch.get_num_threads())).decode()

        paths = self._hosts.agree(f"reserving room for version {version}", reserve, SnapshotSpaceError)
        try:
            if self.is_one_host:
                self._hosts.agree(f"writing version {version}", copy)
                copied_at = time.monotonic()
                answers = [orjson.loads(text) for text in self._hosts.agree(f"digesting version {version}", digest)]
            else:
                self._gather(writer)
                copied_at = time.monotonic()
                answers = [writer.digests(writer.tensors, torch.get_num_threads())] if writer is not None else []
            if writer is None:
                return None
            manifest = writer.seal({name: value for answer in answers for name, value in answer.items()})
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        finally:
            if part is not None and writer is None:
                part.close()
        return WrittenSnapshot(
            path=writer.path, manifest=manifest, copy_s=copied_at - began, digest_s=time.monotonic() - copied_at
        )

    def _gather(self, writer: SnapshotWriter | None) -> None:
        """Write every tensor on the first rank, from the parts of ranks on several hosts."""
        entries = {entry.name: entry for entry in writer.tensors} if writer is not None else {}
        for name, whole in whole_tensors(self._model.published(), self._ranks, self._kind):
            if writer is not None and whole is not None:  # the other ranks take part in gathering
                self._target(writer, entries[name]).copy_(whole.view(-1))

    def _own_rows(self, part: SnapshotPart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of every tensor, with its target in the file."""
        entries = {entry.name: entry for entry in part.tensors}
        for name, weight in self._model.published().items():
            rows, begin = own_part(weight, self._ranks)
            if len(rows):
                yield rows, self._target(part, entries[name])[begin : begin + len(rows)]

    def _target(self, part: SnapshotPart, entry: TensorEntry) -> torch.Tensor:
        bits = part.bits(entry)
        signed = bits.view(f"i{bits.dtype.itemsize}")  # torch knows few operations on unsigned integers
        return torch.from_numpy(signed).view(self._kind)


def _share(entries: Sequence[TensorEntry], ranks: Ranks) -> list[TensorEntry]:
    """The tensors that this rank digests: the largest first, each to the rank with the fewest bytes."""
    loads = [0] * ranks.world_size
    mine = []
    for entry in sorted(entries, key=lambda tensor: (-tensor.length, tensor.name)):
        owner = loads.index(min(loads))
        loads[owner] += entry.length
        if owner == ranks.rank:
            mine.append(entry)
    return mine


class HostCopier:
    """Copies and casts tensors of one device into host memory: directly from the CPU, through pinned buffers from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each flat source on the device into its flat target on the CPU, of the same number of elements.

        All copies are complete on return. From a GPU, one buffer is filled while threads empty the others.
        """
        if self._device.type == "cpu":
            for source, target in pairs:
                target.copy_(source)
            return
        if not self._buffers:
            self._buffers = [
                torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_LANDING_THREADS + 1)
            ]
        landing: deque[Future[torch.Tensor]] = deque()
        with ThreadPoolExecutor(_LANDING_THREADS, "snapshot.land") as pool:
            for turn, (source, target) in enumerate(_pieces(pairs)):
                if turn >= len(self._buffers):
                    landing.popleft().result()  # the buffer of this turn is empty
                data = self._buffers[turn % len(self._buffers)].view(target.dtype)[: len(target)]
                data.copy_(source.to(target.dtype))
                landing.append(pool.submit(target.copy_, data))
            for landed in landing:
                landed.result()


def _pieces(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs in pieces that fit into a buffer."""
    for source, target in pairs:
        step = _STAGED_BYTES // target.element_size()
        yield from zip(source.split(step), target.split(step), strict=True)


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
        for look in range(ROOM_LOOKS + 1):
            try:
                written = self.snapshots.write(version)
                break
            except SnapshotSpaceError as error:
                if look == ROOM_LOOKS:
                    raise
                if not look:
                    log.error("snapshot.no_room", version=version, error=error.message, retry_s=ROOM_EVERY_S)
                time.sleep(ROOM_EVERY_S)
        if look:
            log.info("snapshot.room_again", version=version)
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

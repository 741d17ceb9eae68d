"""Publishes versions of one policy: writes the current weights into a snapshot file, and announces the file to the policy's
publisher, a process that serves the file and is restarted when it dies.

Weights are cast from the master weights, tied ones once. The only place where torch tensors become published bytes. Ranks of one host map one file and each writes its own rows,
without communication:

    first rank reserves the file | all: its name | every rank copies its rows | every rank digests a share of the tensors
    | first rank seals

Ranks on several hosts cannot map one file: there the first rank gathers one whole tensor at a time and writes alone.
Either way ``write`` succeeds or fails on all ranks alike, and only a complete file is visible. The trainer blocks for the
copy and the digests.

Files of other processes may fill shared memory and the spill directory for a while: the trainer waits for space, and
keeps its training state.

    announce -> [alive: send the path] -> done
                [dead, dies, or does not answer] -> kill -> pause -> start, send all kept paths -> done, or repeat

A thread also checks the publisher between announcements: if replicas need the newest version for new rollouts, the
trainer's next batch, and so the next announcement, depends on the publisher.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import orjson
import structlog
import torch

from services.common.aio import backoff
from services.common.config.training import WeightsConfig
from services.common.errors import InfrastructureError
from services.common.net.hosts import host_and_port, host_identity
from services.common.records import WeightVersion
from services.common.system.child import module_command
from services.common.system.processes import AnsweringChild, ChildLostError
from services.common.telemetry.logs import LogEvent
from services.common.weights.snapshot import (
    DEFAULT_ALGORITHM,
    DEFAULT_DIRECTORIES,
    DigestAlgorithm,
    Manifest,
    SnapshotSpaceError,
    SnapshotWriter,
    TensorSpec,
    sweep_orphans,
)
from services.trainer.model.policy_model import PolicyModel
from services.trainer.publisher import PublisherSettings
from services.trainer.ranks import HostGroup, Ranks, even_shares, own_part, whole_tensors

log = structlog.get_logger()

_STAGED_BYTES = 16 << 20  # of each pinned buffer
_LANDING_THREADS = 4  # the first write to a page of the file takes longer than its copy, and threads share that

ROOM_LOOKS = 120  # attempts; counted and not timed, because all ranks must give up at the same one
ROOM_EVERY_S = 5.0

START_TIMEOUT_S = 30.0
ANNOUNCE_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
RESTART_TIMEOUT_S = 300.0  # of repeated restarts, before the trainer gets the error
LOOK_S = 1.0  # interval of the check between announcements


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSnapshot:
    """A sealed snapshot file, and the time until every rank was done."""

    path: Path
    manifest: Manifest
    copy_s: float  # reserving the file, casting and copying
    digest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that can be fetched."""

    version: WeightVersion
    metrics: Mapping[str, float] = field(default_factory=dict)  # cost of publishing, beside the step's own metrics


class Snapshots:
    """Writes and publishes snapshots of one policy's model. The constructor, ``write`` and ``publish`` are collectives."""

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
        process: PublisherProcess | None = None,
    ) -> None:
        """``process`` serves what ``publish`` writes; only the first rank has one."""
        self._model = model
        self._ranks = ranks
        self._run_id = run_id
        self._policy = policy
        self._dtype = dtype
        self._kind: torch.dtype = getattr(torch, dtype)
        self._algorithm = algorithm
        self._directories = directories
        self._process = process
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
        is_first, threads = self._ranks.is_first, torch.get_num_threads()
        writer: SnapshotWriter | None = None  # of the other ranks: once they write to the file

        def reserve() -> str:
            nonlocal writer
            if not is_first:
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
            nonlocal writer
            writer = writer or SnapshotWriter.join(Path(paths[0]))
            self._copy_own_rows(writer)
            return ""

        def digest() -> str:
            assert writer is not None
            mine = even_shares(writer.tensors, attrgetter("length"), self._ranks.world_size)[self._ranks.rank]
            return orjson.dumps(writer.digests(mine, threads)).decode()

        paths = self._hosts.agree(f"reserving room for version {version}", reserve, SnapshotSpaceError)
        try:
            if self.is_one_host:
                self._hosts.agree(f"writing version {version}", copy)
                copied_at = time.monotonic()
                answers = [orjson.loads(text) for text in self._hosts.agree(f"digesting version {version}", digest)]
            else:
                self._gather(writer)
                copied_at = time.monotonic()
                answers = [writer.digests(writer.tensors, threads)] if writer is not None else []
            if writer is None or not is_first:
                return None
            manifest = writer.seal({name: value for answer in answers for name, value in answer.items()})
        except BaseException:
            if writer is not None and is_first:
                writer.abandon()
            raise
        finally:
            if writer is not None and not is_first:
                writer.close()
        return WrittenSnapshot(
            path=writer.path, manifest=manifest, copy_s=copied_at - began, digest_s=time.monotonic() - copied_at
        )

    def publish(self, version: int) -> Published | None:
        """Write and announce a version; None except on the first rank.

        Raises, on every rank alike:
            SnapshotSpaceError: no space for ten minutes.
        """
        for look in range(ROOM_LOOKS + 1):
            try:
                written = self.write(version)
                break
            except SnapshotSpaceError as error:
                if look == ROOM_LOOKS:
                    raise
                if not look:
                    log.error("snapshot.no_room", version=version, error=error.message, retry_s=ROOM_EVERY_S)
                time.sleep(ROOM_EVERY_S)
        if look:
            log.info("snapshot.room_again", version=version)
        if written is None or self._process is None:
            return None
        self._process.announce(written.path)
        source = self._process.address
        return Published(
            version=WeightVersion(
                policy=self._policy, number=version, digest=written.manifest.digest, sources=(source,)
            ),
            metrics={
                "snapshot_s": written.copy_s,
                "snapshot_digest_s": written.digest_s,
                "snapshot_bytes": float(written.manifest.size_bytes),
            },
        )

    def _gather(self, writer: SnapshotWriter | None) -> None:
        """Write every tensor on the first rank, from the parts of ranks on several hosts."""
        targets = self._targets(writer) if writer is not None else {}
        for name, whole in whole_tensors(self._model.published(), self._ranks, self._kind):
            if whole is not None:  # the other ranks take part in gathering
                targets[name].copy_(whole.view(-1))

    def _copy_own_rows(self, writer: SnapshotWriter) -> None:
        """Copy this rank's part of every tensor to its place in the file."""
        targets, pairs = self._targets(writer), []
        for name, weight in self._model.published().items():
            rows, begin = own_part(weight, self._ranks)
            if len(rows):
                pairs.append((rows, targets[name][begin : begin + len(rows)]))
        self._copier.copy(pairs)

    def _targets(self, writer: SnapshotWriter) -> dict[str, torch.Tensor]:
        """The flat tensors over the file, by name."""
        bits = {entry.name: writer.bits(entry) for entry in writer.tensors}
        # As signed integers: torch knows few operations on unsigned ones.
        return {
            name: torch.from_numpy(own.view(f"i{own.dtype.itemsize}")).view(self._kind) for name, own in bits.items()
        }


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


class PublisherProcess:
    """One publisher process, restarted on the same address with the same snapshots after its death.

    A publisher that fails during an exchange is killed, so that a late answer is never matched to a later question.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        self._settings = settings
        self._keep = settings.weights.keep_versions
        self._announced: list[Path] = []  # oldest first; a path is dropped when the publisher has removed its file
        self._process: AnsweringChild | None = None
        self._lock = threading.Lock()  # one exchange with the process at a time
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self.address = ""

    @property
    def pid(self) -> int | None:
        """None before ``start``."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start and read the address; raises ``InfrastructureError`` with the publisher's message."""
        with self._lock:
            self._start()
        self._watcher = threading.Thread(target=self._watch, name="publisher.watch", daemon=True)
        self._watcher.start()

    def announce(self, path: Path) -> None:
        """Announce a sealed snapshot; restarts a dead publisher until the announcement succeeds.

        Raises:
            InfrastructureError: the publisher refuses the snapshot, or restarts have failed for ``RESTART_TIMEOUT_S``.
        """
        with self._lock:
            self._announced = [*(known for known in self._announced if known != path and known.exists()), path]
            until = time.monotonic() + RESTART_TIMEOUT_S
            for delay in backoff(0.1, 5.0):
                try:
                    if self._process is not None and self._process.poll() is None:
                        self._tell(path)
                    else:
                        self._start_again()
                    return
                except ChildLostError as error:
                    log.warning("publisher.lost", error=error.message, snapshot=path.name)
                    if time.monotonic() > until:
                        raise InfrastructureError(
                            f"no weight publisher accepted {path.name} within {RESTART_TIMEOUT_S:g} s: {error.message}"
                        ) from error
                self._stopping.wait(delay)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is None:
                return
            self._process.close(STOP_TIMEOUT_S)  # the publisher ends at the end of its input
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        """Restart a dead publisher, until ``stop``. The kernel ends a publisher with the thread that started the process."""
        while not self._stopping.wait(LOOK_S):
            with self._lock:
                if self._stopping.is_set() or self._process is None or self._process.poll() is None:
                    continue
                try:
                    self._start_again()
                except (InfrastructureError, OSError) as error:
                    log.error("publisher.not_restarted", error=str(error), retry_s=LOOK_S)

    def _start_again(self) -> None:
        """Start a new process, and announce the kept snapshots again."""
        log.warning("publisher.restarted", exit_code=self._process.poll() if self._process else None)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)  # a killed process holds the port until its end
            self._process.close()
        self._start()
        self._announced = [known for known in self._announced if known.exists()]
        for left in self._announced[: -self._keep]:  # the dead publisher cannot remove these any more
            left.unlink(missing_ok=True)
        for kept in self._announced[-self._keep :]:
            self._tell(kept)

    def _start(self) -> None:
        self._process = AnsweringChild(
            "the publisher",
            module_command("services.trainer.publisher", self._settings.model_dump_json()),
        )
        answer = self._process.ask("the publisher's start", START_TIMEOUT_S)
        if "error" in answer:  # such as a port in use
            raise ChildLostError(f"weight publisher: {answer['error']}; its log says more")
        self.address = str(answer["address"])
        _, port = host_and_port(self.address)
        self._settings = self._settings.model_copy(update={"port": port})  # replicas know it: the same after restarts

    def _tell(self, path: Path) -> None:
        """Let the publisher serve a snapshot.

        Raises:
            ChildLostError: the publisher is dead or does not answer.
            InfrastructureError: the publisher answers with an error, whose message this error has.
        """
        assert self._process is not None
        wait = f"the publisher's answer about {path.name}"
        answer = self._process.ask(wait, ANNOUNCE_TIMEOUT_S, {"add": str(path)})
        if "error" in answer:
            raise InfrastructureError(f"weight publisher: {answer['error']}")

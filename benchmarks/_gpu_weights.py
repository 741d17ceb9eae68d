"""Two versions of an 8B model from the trainer's masters to an engine's stage, by one true layer. Part of ``gpu_kit.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from services.cli.check.memory import KNOWN_SHAPES
from services.common.config.training import WeightsConfig
from services.common.pb import weights_pb2_grpc
from services.common.records import WeightVersion
from services.common.rpc.server import Server
from services.common.transfer.servicer import WeightServicer
from services.common.weights.snapshot import Manifest, SnapshotWriter, TensorSpec
from services.inference.engine.base import WeightUpdate, num_threads
from services.inference.engine.served.stage import Stage
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import SourceFetcher
from services.trainer.publish import HostCopier
from services.trainer.publisher import PublisherStore

VERSION_BYTES = 2 * KNOWN_SHAPES["Qwen3-8B"].num_parameters
RUN, POLICY = "gpu-kit", "model0"
_BLOCK = 1 << 22
_REPEATS = 3
_THREADS = {"verify_s": num_threads(), "stage_s": num_threads()}  # the others are of one core
T = TypeVar("T")


class OneHost:
    """Two versions from masters to the stage of an engine."""

    def __init__(self, directory: Path, specs: list[TensorSpec], repeats: int = _REPEATS) -> None:
        self.directory = directory
        self._specs = specs
        self._repeats = repeats
        self.scale = VERSION_BYTES / sum(spec.size_bytes for spec in specs)
        self._wall: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    async def run(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of each stage for a version of 8B, the best of a few versions: by the clock, and in CPU seconds per thread
        of the stage, which are those of a machine without other load."""
        store = PublisherStore(RUN, POLICY, WeightsConfig(transfer="auto"))
        server = Server(service="publisher", instance_id="p", host="127.0.0.1", port=0)
        server.add(
            weights_pb2_grpc.add_WeightServiceServicer_to_server,
            WeightServicer({POLICY: store}),
            "rollmill.v1.WeightService",
        )
        await server.start()
        mirror, stage = Mirror(POLICY), None
        fetcher = SourceFetcher(RUN)
        try:
            for version in range(1, self._repeats + 2):
                path, manifest = self.write(version)
                self._time("announce_s", partial(store.add, path))
                wanted = WeightVersion(policy=POLICY, number=version, digest=manifest.digest, sources=(server.address,))
                began, spent = time.perf_counter(), time.process_time()
                fetched = await fetcher.fetch(wanted, mirror.base, None)
                self.note("fetch_s", time.perf_counter() - began, time.process_time() - spent)
                assert fetched.transport == "mapped", "one host maps"
                verified = self._time("verify_s", partial(mirror.verify, fetched.payload, fetched.data, borrowed=True))
                self._time("mirror_s", partial(mirror.write, verified))
                whole = mirror.host_tensors()
                if stage is None:
                    stage = Stage(self.directory / "stage", whole, version)
                else:
                    self._time("stage_s", partial(stage.write, WeightUpdate.full(whole, version)))
                self.serve(whole, version)
                del fetched, verified, whole
        finally:
            await server.stop(grace_s=0.1)
            store.close()
        wall, cpu = (
            {name: seconds * self.scale for name, seconds in times.items()} for times in (self._wall, self._cpu)
        )
        return wall, cpu

    def serve(self, whole: dict[str, torch.Tensor], version: int) -> None:
        """Called with each version once it is on the stage."""

    @cached_property
    def _masters(self) -> torch.Tensor:
        """Larger than caches; tensors take their values from it in turns."""
        return _masters(1 << 27, 0)

    def write(self, version: int) -> tuple[Path, Manifest]:
        """Write and seal a version, and note the seconds of both parts."""
        with SnapshotWriter.create(
            run_id=RUN, policy=POLICY, version=version, specs=self._specs, directories=(self.directory,)
        ) as writer:
            copier, pairs, offset = HostCopier(torch.device("cpu")), [], version
            for entry in writer.tensors:
                target = torch.from_numpy(writer.bits(entry).view(np.int16)).view(torch.bfloat16)
                for begin in range(0, len(target), len(self._masters) // 2):
                    part = target[begin : begin + len(self._masters) // 2]
                    pairs.append((self._masters[offset : offset + len(part)], part))
                    offset = (offset + len(part)) % (len(self._masters) // 2)
            self._time("copy_s", partial(copier.copy, pairs))
            del pairs, target, part
            digests = self._time("digest_s", partial(writer.digests, writer.tensors, 1))
            return writer.path, writer.seal(digests)

    def _time(self, name: str, action: Callable[[], T]) -> T:
        began, spent = time.perf_counter(), time.process_time()
        result = action()
        self.note(name, time.perf_counter() - began, (time.process_time() - spent) / _THREADS.get(name, 1))
        return result

    def note(self, name: str, wall_s: float, cpu_s: float) -> None:
        self._wall[name] = min(wall_s, self._wall.get(name, wall_s))
        self._cpu[name] = min(cpu_s, self._cpu.get(name, cpu_s))


def _masters(count: int, seed: int) -> torch.Tensor:
    block = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
    return torch.from_numpy(np.resize(block, count))

"""A weight version of an 8B model from the trainer's masters to an engine, by the rates of one true layer and the embedding.

One layer and the embedding of Qwen3-8B (1.6 GB in bf16) pass through the code of a run: masters are cast and copied into a
snapshot, digested and sealed; a receiver on the same host asks a publisher over gRPC with ``transfer: auto``, maps the file,
verifies it and writes its mirror; the engine's stage takes the whole version. Each stage's rate gives its time for all
8.19 billion parameters: in CPU seconds, and by the clock (``wall``) under the load of this machine. The load of SGLang from the stage, which needs a GPU, is left out.

For receivers on another host: coding, decoding and verifying one true matrix at 1, 5 and 17% changed elements in CPU seconds
of one core, and the bytes over a link of 25 Gbit/s, as a delta and in full. Part of
``rehearsal_8b.py``.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from services.cli.check.memory import KNOWN_SHAPES
from services.common.config.training import WeightsConfig
from services.common.pb import weights_pb2_grpc
from services.common.records import WeightVersion
from services.common.rpc.server import Server
from services.common.system.machine import keep_freed_memory
from services.common.transfer.servicer import WeightServicer
from services.common.weights.codec import decode_tensor, encode_tensor
from services.common.weights.snapshot import Bits, Manifest, SnapshotWriter, TensorSpec, tensor_digest
from services.inference.engine.base import WeightUpdate, num_threads
from services.inference.engine.served.stage import Stage
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import SourceFetcher
from services.trainer.publish import HostCopier
from services.trainer.publisher import PublisherStore

SHAPE = KNOWN_SHAPES["Qwen3-8B"]
VERSION_BYTES = 2 * SHAPE.num_parameters
LINK_BYTES_PER_S = 25e9 / 8
CODING_THREADS = 4  # of a publisher, which are 1.9 times as fast as one
CODING_GAIN = 1.9
CHANGED = {1: 2.3e-7, 5: 1.7e-6, 17: 7.6e-6}  # percent -> standard deviation of an update of masters around 0.02

RUN, POLICY = "rehearsal", "model0"
_BLOCK = 1 << 22
_REPEATS = 3
_THREADS = {"verify_s": num_threads(), "stage_s": num_threads()}  # the others are of one core
T = TypeVar("T")


def layer_specs(*, rows: int | None = None) -> list[TensorSpec]:
    """One layer and the embedding; ``rows`` of the embedding instead of the whole vocabulary."""
    hidden, wide, kv = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_width
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (rows or SHAPE.vocabulary, hidden),
        **{f"layers.0.self_attn.{name}_proj": (hidden, hidden) for name in "qo"},
        **{f"layers.0.self_attn.{name}_proj": (kv, hidden) for name in "kv"},
        **{f"layers.0.mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")},
        "layers.0.mlp.down_proj": (hidden, wide),
        "layers.0.input_layernorm": (hidden,),
    }
    return [TensorSpec(name=f"model.{name}.weight", dtype="bfloat16", shape=shape) for name, shape in shapes.items()]


def weight_rows(quick: bool) -> dict[str, object]:
    """Seconds of each stage for 8B on one host, and the table over a link. ``quick``: a quarter of the embedding."""
    keep_freed_memory(one_arena=True)
    rows = SHAPE.vocabulary // 4 if quick else None
    directory = Path(tempfile.mkdtemp(prefix="rollmill-rehearsal-", dir="/dev/shm"))
    try:
        stages = asyncio.run(OneHost(directory, layer_specs(rows=rows)).run())
    finally:
        shutil.rmtree(directory)
    wall, cpu = stages
    ways = {"announce_s", "fetch_s", "verify_s", "mirror_s", "stage_s"}
    return {
        "publish_to_serving_s_8b": sum(seconds for name, seconds in cpu.items() if name in ways),
        "publish_to_serving_wall_s_8b": sum(seconds for name, seconds in wall.items() if name in ways),
        "snapshot_s_8b": cpu["copy_s"] + cpu["digest_s"],
        "snapshot_wall_s_8b": wall["copy_s"] + wall["digest_s"],
        "stages_8b": cpu,
        "stages_wall_8b": wall,
        "link_table": [link_row(percent) for percent in CHANGED],
    }


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRates:
    """Of one matrix, on one core: bytes of the version per CPU second, and bytes of the delta over those of the version."""

    changed: float
    encode: float
    decode: float
    digest: float
    share: float


def codec_rates(percent: int, rows: int | None = None) -> CodecRates:
    """Rates on the gate matrix of a true layer, of which about that percentage of elements changes."""
    count = (rows or SHAPE.intermediate) * SHAPE.hidden
    masters = _masters(count, 1)
    old = _cast(masters)
    masters += (
        torch.from_numpy(np.resize(np.random.default_rng(2).standard_normal(_BLOCK + 7, dtype=np.float32), count))
        * CHANGED[percent]
    )
    new = _cast(masters)
    coded = encode_tensor(old, new, "bfloat16")

    def decode() -> None:
        for _ in decode_tensor(old, coded, "bfloat16"):
            pass

    return CodecRates(
        changed=float(np.count_nonzero(old != new)) / count,
        encode=old.nbytes / _cpu_s(partial(encode_tensor, old, new, "bfloat16")),
        decode=old.nbytes / _cpu_s(decode),
        digest=old.nbytes / _cpu_s(partial(tensor_digest, new)),
        share=len(coded) / old.nbytes,
    )


def link_row(percent: int, rows: int | None = None) -> dict[str, Any]:
    """One row of the table: seconds for a version of 8B over the link, as a delta and in full."""
    rates = codec_rates(percent, rows)
    verify_s = VERSION_BYTES / rates.digest
    encode_s = VERSION_BYTES / (CODING_GAIN * rates.encode)
    wire_s, decode_s = rates.share * VERSION_BYTES / LINK_BYTES_PER_S, VERSION_BYTES / rates.decode
    return {
        "changed": rates.changed,
        "encode_gbs": rates.encode / 1e9,
        "decode_gbs": rates.decode / 1e9,
        "delta_gb": rates.share * VERSION_BYTES / 1e9,
        "encode_s": encode_s,
        "wire_s": wire_s,
        "decode_s": decode_s,
        "verify_s": verify_s,
        "delta_s": encode_s + wire_s + decode_s + verify_s,
        "full_s": VERSION_BYTES / LINK_BYTES_PER_S + verify_s,
    }


def _masters(count: int, seed: int) -> torch.Tensor:
    block = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
    return torch.from_numpy(np.resize(block, count))


def _cast(masters: torch.Tensor) -> Bits:
    bits: Bits = masters.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return bits


def _cpu_s(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return min(taken)

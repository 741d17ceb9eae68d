"""The items of ``gpu_kit.py``: each is a generator of figures, which the parent process keeps as they come.

On a CPU the same code runs with small shapes; its speeds and shares have no meaning then.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu_run
from benchmarks._bench import ROOT
from benchmarks._gpu_check_rank import documents, share
from benchmarks.rehearsal_8b import config_of
from recipes.quickstart.model import build, build_tokenizer
from services.cli.check.memory import GIB, KNOWN_SHAPES, ModelShape, trainer_rank_parts
from services.common.config.training import PolicyConfig, WeightsConfig
from services.common.pb import weights_pb2_grpc
from services.common.records import Sampling, WeightVersion
from services.common.rpc.server import Server
from services.common.transfer.servicer import WeightServicer
from services.common.weights.snapshot import Manifest, SnapshotWriter, TensorSpec
from services.inference.engine.base import GenerationRequest, WeightUpdate
from services.inference.engine.served.stage import FILE, Stage
from services.inference.engine.torch.decoder import Decoder, prepare
from services.inference.engine.torch.engine import TorchEngine
from services.inference.weights.mirror import MOST_THREADS, Mirror
from services.inference.weights.updater import SourceFetcher
from services.trainer.metrics import StepMetrics, peak_flops
from services.trainer.model.attention import Documents, documents_attention
from services.trainer.model.logprobs import Targets, token_logprobs
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import AdapterSetup, PolicyModel, WithoutAdapter, build_policy_model
from services.trainer.publish import HostCopier, Snapshots
from services.trainer.publisher import PublisherStore
from services.trainer.ranks import Ranks, init_ranks, leave_ranks
from services.trainer.step import TrainStep
from tests.documented import files

# --- The device that ``gpu_kit.py`` measures, its models, and the time of its kernels.


Figures = Iterator[dict[str, Any]]
TINY = ModelShape(
    num_parameters=2_000_000, num_layers=2, hidden=256, intermediate=512, kv_width=128, vocabulary=1000, tied=True
)
QWEN3_4B = ModelShape(
    num_parameters=4_022_468_096, num_layers=36, hidden=2560, intermediate=9728, kv_width=1024, vocabulary=151_936,
    query_width=4096, tied=True,
)  # fmt: skip
GATHERS = re.compile(r"gather|index|embedding", re.IGNORECASE)
MARKS = ("FSDP::", "Optimizer.", "nccl:", "## ", "ProfilerStep")  # spans of other kernels
ATTENTION = re.compile(r"fmha|flash|attention|softmax", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """The device, and whether shapes are small."""

    device: str

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def size(self, large: int, small: int) -> int:
        return small if self.small else large

    def shape(self, name: str) -> ModelShape:
        return TINY if self.small else {**KNOWN_SHAPES, "Qwen3-4B": QWEN3_4B}[name]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Median of a few calls, after one that warms up."""
        taken = []
        for _ in range(repeats + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def kernels(self, work: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds in which the device computes, and seconds by name of the kernel."""
        if self.device == "cpu":
            work()
            return 0.0, {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.wait()
        events = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(MARKS)
        )
        busy, last, names = 0.0, 0.0, dict[str, float]()
        for start, end, name in events:
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
            names[name[:70]] = names.get(name[:70], 0.0) + (end - start) / 1e6
        return busy / 1e6, dict(sorted(names.items(), key=lambda pair: -pair[1]))

    def model(self, shape: ModelShape, dtype: torch.dtype) -> Any:
        """Random weights, made on the device."""
        torch.manual_seed(0)
        config = config_of(shape)
        config.max_position_embeddings = 131_072
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)


def top(names: dict[str, float], count: int = 10) -> dict[str, float]:
    """Milliseconds of the kernels that take longest."""
    return {name: 1e3 * seconds for name, seconds in list(names.items())[:count]}


def share_of(pattern: re.Pattern[str], names: dict[str, float]) -> float:
    return sum(seconds for name, seconds in names.items() if pattern.search(name)) / (sum(names.values()) or 1.0)


def reserved(place: Place) -> float:
    return torch.cuda.max_memory_reserved() / GIB if place.device == "cuda" else 0.0


def release(place: Place) -> None:
    gc.collect()
    if place.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- Two versions of an 8B model from the trainer's masters to an engine's stage, by one true layer. Part of
# ``gpu_kit.py``.


VERSION_BYTES = 2 * KNOWN_SHAPES["Qwen3-8B"].num_parameters
RUN, POLICY = "gpu-kit", "model0"
_BLOCK = 1 << 22
_REPEATS = 3
_THREADS = {"verify_s": MOST_THREADS}  # the others are of one core
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
        writer = SnapshotWriter.create(
            run_id=RUN, policy=POLICY, version=version, specs=self._specs, directories=(self.directory,)
        )
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


# --- The benchmark itself.


# -- 1, 2: the machine, and the tests ------------------------------------------------------------------------------------


def machine(place: Place) -> Figures:
    for service in ("orchestrator", "inference", "trainer", "envgateway", "cli"):
        importlib.import_module(f"services.{service}.__main__")
    packages = {name: getattr(importlib.import_module(name), "__version__", "") for name in ("transformers", "numpy")}
    free = {name: shutil.disk_usage(name).free / GIB for name in ("/dev/shm", tempfile.gettempdir())}
    yield {"python": sys.version.split()[0], "torch": torch.__version__, **packages, "free_gib": free}
    yield {"ram_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB}
    if place.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        name, driver, memory = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(", ")[:3]
        yield {"gpu": name, "driver": driver, "memory": memory.split("\n")[0]}


def gpu_tests(place: Place) -> Figures:
    names = ("trainer", "engine", "turns", "snapshot")
    paths = [f"tests/gpu/test_{name}_on_gpu.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", "--tb=short", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-2000:])
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    yield {"counts": counts, "exit": done.returncode, "passed": counts.get("passed", 0), "failed": failed}
    if failed or done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}: {', '.join(failed) or done.stdout[-2000:]}")


# -- 3, 4, 9: training steps ---------------------------------------------------------------------------------------------


def policy_of(
    tokens: int, *, kl: float = 0.0, adapter: dict[str, Any] | None = None, loss: str = "m2po"
) -> PolicyConfig:
    """The section of a recipe on a GPU; `rollmill check` estimates its memory."""
    return PolicyConfig.model_validate(
        {
            "model": {"path": "random", "context_length": tokens},
            "algorithm": {"name": loss, "kl_coefficient": kl},
            "trainer": {"device": "cuda", "token_budget": tokens},
            **({} if adapter is None else {"adapter": adapter}),
        }
    )


@dataclass
class Training:
    """A training step of one rank on random weights, as the trainer builds it on a GPU."""

    place: Place
    shape: ModelShape
    policy: PolicyConfig
    change: Callable[[Any], object] = id  # the loaded model, before it is wrapped

    def __post_init__(self) -> None:
        place, adapter = self.place, None
        if self.policy.adapter is not None:
            adapter = AdapterSetup(config=self.policy.adapter, dtype=torch.float32, seed=0)
        self.ranks = init_ranks(timeout_s=120.0, device=place.device, always_group=True)
        self.causal_lm = place.model(self.shape, torch.float32 if adapter is None else torch.bfloat16)
        self.change(self.causal_lm)
        self.model = build_policy_model(
            self.causal_lm, self.ranks, gradient_checkpointing=True, compute_dtype=torch.bfloat16, adapter=adapter
        )
        self.step = TrainStep(
            self.model,
            PolicyOptimizer(self.model.named_parameters(), self.policy.optimizer),
            self.policy.algorithm,
            self.ranks,
            max_tokens_per_micro_batch=self.policy.trainer.token_budget,
            reference=WithoutAdapter(self.model) if self.policy.algorithm.needs_reference else None,
            peak_flops=peak_flops(self.ranks.device, torch.bfloat16),
        )

    def run(self, num_documents: int, number: int = 1) -> StepMetrics:
        tokens = self.policy.trainer.token_budget
        items = documents([(tokens // 16, tokens - tokens // 16)] * num_documents, self.shape.vocabulary, number)
        return self.step.run(share(items, self.ranks, number))

    def figures(self, num_documents: int, steps: int = 3) -> dict[str, Any]:
        """Of the median step; the first is left out. ``busy`` is the device's, of a step without the profiler."""
        if self.place.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.run(num_documents)
        cpu = time.thread_time()
        told = [self.run(num_documents, 2 + number) for number in range(steps)]
        cpu = (time.thread_time() - cpu) / steps
        middle = sorted(told, key=lambda metrics: metrics.tokens_per_second)[steps // 2]
        return {
            "tokens_per_s": middle.tokens_per_second, "step_s": middle.seconds, "mfu": middle.mfu, "cpu_s": cpu,
            "memory_peak_gib": max(metrics.memory_peak_gib for metrics in told), "reserved_gib": reserved(self.place),
            "losses": [metrics.loss for metrics in told], "grad_norms": [metrics.grad_norm for metrics in told],
        }  # fmt: skip

    def profile(self, num_documents: int, step_s: float) -> dict[str, Any]:
        busy, names = self.place.kernels(lambda: self.run(num_documents, 9))
        return {"busy": busy / step_s, "kernels_ms": top(names)}

    def estimate(self) -> dict[str, float]:
        """What `rollmill check` prints, and the same without its allowance for CUDA and fragmentation."""
        parts = trainer_rank_parts(self.shape, self.policy)
        return {"check_gib": sum(parts.values()) / GIB, "formula_gib": (sum(parts.values()) - parts["allowance"]) / GIB}

    def logprobs(self, tokens: int) -> torch.Tensor:
        ids = torch.arange(tokens, device=self.ranks.device) * 7919 % self.shape.vocabulary
        every = np.arange(tokens - 1)
        targets = Targets.of(every, ids[1:].cpu().numpy(), self.ranks.device, distinct=True)
        at = torch.arange(tokens, device=self.ranks.device)
        with torch.no_grad():
            found: torch.Tensor = self.model(
                ids, at, Documents.from_offsets(np.array([0, tokens]), self.ranks.device), targets, 1.0
            )[0]
        return found.float()

    def close(self) -> None:
        leave_ranks()
        del self.step, self.model, self.causal_lm
        release(self.place)


def check_finite(told: dict[str, Any]) -> None:
    if not np.isfinite([*told["losses"], *told["grad_norms"]]).all():
        raise RuntimeError(f"losses {told['losses']}, gradients {told['grad_norms']}: not all are finite")


def trainer(place: Place) -> Figures:
    tokens = place.size(16_384, 256)
    for loss in ("grpo", "m2po"):  # grpo passes forwards and backwards once, like the figure to compare with
        training = Training(place, place.shape("Qwen3-0.6B"), policy_of(tokens, loss=loss))
        told = training.figures(2, 3 if loss == "grpo" else 1)
        check_finite(told)
        if loss == "grpo":
            yield {**told, **training.estimate()}
            yield training.profile(2, told["step_s"])
        else:
            yield {"m2po": told}
        training.close()


def adapter(place: Place) -> Figures:
    tokens = place.size(16_384, 256)
    for model, name, kl in (("8B", "without_kl", 0.0), ("8B", "with_kl", 0.001), ("4B", "4b", 0.0)):
        policy = policy_of(tokens, kl=kl, adapter={"rank": 16, "alpha": 32})
        training = Training(place, place.shape(f"Qwen3-{model}"), policy)
        told = {**training.figures(1, 2), **training.estimate()}
        check_finite(told)
        yield {name: told, "memory_over_formula": told["memory_peak_gib"] / told["formula_gib"]}
        training.close()


def fused(place: Place) -> Figures:
    """Liger's elementwise kernels, and compiled layers, below the same step."""

    def liger(causal_lm: Any) -> None:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(
            rope=True,
            rms_norm=True,
            swiglu=True,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            model=causal_lm,
        )

    def compiled(causal_lm: Any) -> None:
        for layer in causal_lm.model.layers:
            layer.compile()

    # Liger last: it changes transformers' classes for good.
    ways: dict[str, Callable[[Any], object]] = {"plain": id, "compiled": compiled, "liger": liger}
    tokens, plain = place.size(16_384, 256), (0.0, torch.zeros(0))
    for name, change in ways.items():
        if place.small and name != "plain":  # Triton needs a GPU
            continue
        training = Training(place, place.shape("Qwen3-0.6B"), policy_of(tokens, loss="grpo"), change)
        logprobs = training.logprobs(place.size(4096, 64))
        told = training.figures(1, 2)
        if name == "plain":
            plain = told["step_s"], logprobs
        gap = float((logprobs - plain[1]).abs().max())
        yield {name: {key: told[key] for key in ("step_s", "tokens_per_s", "memory_peak_gib")}}
        yield {f"{name}_step": told["step_s"] / plain[0], f"{name}_gap": gap}
        training.close()


# -- 5: a version of 8B on one host --------------------------------------------------------------------------------------


class OnCard(OneHost):
    """Masters in float32 and the weights of an engine in bfloat16, both on the device."""

    def __init__(self, directory: Path, place: Place, model: PolicyModel, specs: list[TensorSpec]) -> None:
        super().__init__(directory, specs, repeats=1)
        self.place = place
        self.model = model
        self.snapshots = Snapshots(
            model, Ranks.single(place.device), run_id=RUN, policy=POLICY, dtype="bfloat16", directories=[directory]
        )
        self.told: dict[str, Any] = {}

    @cached_property
    def served(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(one, dtype=torch.bfloat16) for name, one in self.model.published().items()}

    @torch.no_grad()
    def write(self, version: int) -> tuple[Path, Manifest]:
        for parameter in self.model.parameters():
            parameter.mul_(1.01)
        self.place.wait()
        written = self.snapshots.write(version)
        assert written is not None
        self.note("copy_s", written.copy_s, written.copy_s)
        self.note("digest_s", written.digest_s, written.digest_s)
        return written.path, written.manifest

    @torch.no_grad()
    def serve(self, whole: dict[str, torch.Tensor], version: int) -> None:
        """Into the weights of an embedded engine; then from the stage as a server reads it."""
        began = time.perf_counter()
        prepared = prepare(WeightUpdate.full(whole, version), self.served)
        self.place.wait()
        self.told["prepare_s"] = time.perf_counter() - began
        began = time.perf_counter()
        prepared.apply()
        self.place.wait()
        self.told["apply_s"] = time.perf_counter() - began
        self.told["equal"] = all(
            torch.equal(self.served[name], master.to(torch.bfloat16)) for name, master in self.model.published().items()
        )
        del prepared
        if version == 2 and self.place.device == "cuda":
            torch.cuda.empty_cache()
            self._from_stage()

    def _from_stage(self) -> None:
        mapped = torch.from_numpy(np.memmap(self.directory / "stage" / FILE, dtype=np.uint8, mode="r+"))
        target = torch.empty(len(mapped), dtype=torch.uint8, device=self.place.device)
        copy = partial(target.copy_, mapped)
        self.told["pageable_s"] = self.place.seconds(copy, 1)
        cudart = torch.cuda.cudart()
        began = time.perf_counter()
        code = cudart.cudaHostRegister(mapped.data_ptr(), len(mapped), 0)
        self.told["register_s"], self.told["register_code"] = time.perf_counter() - began, int(code)
        if not int(code):
            self.told["registered_s"] = self.place.seconds(copy, 1)
            cudart.cudaHostUnregister(mapped.data_ptr())


def version_8b(place: Place) -> Figures:
    """With fewer layers where shared memory has no room for two versions and a stage; seconds are then scaled to all."""
    shared, shape = Path("/dev/shm"), place.shape("Qwen3-8B")
    full = 2 * shape.num_parameters
    layer = 0 if place.small else 2 * (shape.num_parameters - 2 * shape.vocabulary * shape.hidden) // shape.num_layers
    fits = int((shutil.disk_usage(shared).free / 3.2 - full) // layer) + shape.num_layers if layer else shape.num_layers
    shape = replace(shape, num_layers=max(1, min(shape.num_layers, fits)))
    torch.set_num_threads(1)  # as a rank of the trainer
    model = build_policy_model(place.model(shape, torch.float32), Ranks.single(place.device))
    specs = [TensorSpec(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in model.published().items()]
    directory = Path(tempfile.mkdtemp(prefix="rollmill-gpu-kit-", dir=shared))
    try:
        host = OnCard(directory, place, model, specs)
        wall, _ = asyncio.run(host.run())
    finally:
        shutil.rmtree(directory)
    told = {name: seconds * host.scale if name.endswith("_s") else seconds for name, seconds in host.told.items()}
    before = sum(wall[name] for name in ("announce_s", "fetch_s", "verify_s", "mirror_s"))
    yield {
        "layers": shape.num_layers, "gb": VERSION_BYTES / 1e9, "wall": wall, **told,
        "snapshot_s": wall["copy_s"] + wall["digest_s"],
        "publish_to_swap_s": before + told["prepare_s"] + told["apply_s"],
        "publish_to_stage_load_s": before + wall["stage_s"] + told.get("pageable_s", 0.0),
    }  # fmt: skip
    if not host.told["equal"]:
        raise RuntimeError("the engine's weights are not the bits of the masters")


# -- 10, 11: whole runs --------------------------------------------------------------------------------------------------


def coin(task: dict[str, Any], completion: str) -> float:
    """A reward for random weights: half of the answers, by their characters."""
    return float(sum(completion.encode()) % 2)


def save_true_shape(directory: Path, place: Place) -> None:
    """Random weights, and a tokenizer of as many tokens as the model's, of which the last cannot be read from text."""
    shape = place.shape("Qwen3-0.6B")
    causal_lm = place.model(shape, torch.bfloat16)
    build_tokenizer(1).save_pretrained(directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"w{number}": number for number in range(1 + max(known.values()), shape.vocabulary)}
    file.write_text(json.dumps(tokenizer))
    causal_lm.config.eos_token_id = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"].get(
        "<|im_end|>"
    )
    causal_lm.save_pretrained(directory)


def guide(place: Place) -> Figures:
    """docs/train-my-model.md as it is, with random weights of the true shape, a reward that such weights can get, one step."""
    with tempfile.TemporaryDirectory(prefix="rollmill-gpu-kit-") as made:
        directory = Path(made)
        for name, text in files("train-my-model.md").items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        subprocess.run([sys.executable, "mine/make_data.py"], cwd=directory, check=True)
        save_true_shape(directory / "model", place)
        release(place)
        settings = {
            "policies.model0.model.path": directory / "model", "run.steps": 1, "run.dir": directory / "runs", "run.id": "guide",
            "workflow.settings.reward": "benchmarks._gpu_items:coin", "evaluation.at_start": "false",
            "evaluation.at_end": "false", "policies.model0.trainer.export_final": "false",
        }  # fmt: skip
        if place.small:
            small = {
                "sampling.max_new_tokens": 16,
                "policies.model0.batch.size": 16,
                "policies.model0.batch.minibatches": 2,
            }
            settings |= {**small, "policies.model0.model.context_length": 512}
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        for verb, more in (("check", []), ("run", ["--json"])):
            command = [sys.executable, "-m", "services.cli", verb, "mine/recipe.yaml", *more]
            command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            began = time.perf_counter()
            with gpu_run.memory_of_the_card(place.device) as memory:
                done = subprocess.run(
                    command, cwd=directory, env=variables, capture_output=True, text=True, timeout=240
                )
            print(done.stdout[-6000:], done.stderr[-6000:])
            if done.returncode:
                raise RuntimeError(
                    f"rollmill {verb} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
                )
            yield {f"{verb}_s": time.perf_counter() - began}
            if verb == "check":
                yield {"check": [line for line in done.stdout.splitlines() if "GiB" in line or "ready" in line]}
        run = directory / "runs" / "guide"
        rows = [json.loads(line) for line in (run / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
        step = next(row for row in rows if row["kind"] == "training_step")
        facts = ("trainer/num_trained_tokens", "trainer/tokens_per_second", "trainer/memory_peak_gib")
        yield {
            "card_peak_gib": max(memory, default=0.0), "trainer_s": step["trainer/seconds"], **{key.split("/")[1]: step.get(key) for key in facts},
            "changed": sorted(set(settings) - {"run.dir", "run.id"}),
        }  # fmt: skip


def shared_run(place: Place) -> Figures:
    size = gpu_run.SIZES["quick" if place.small else "gpu"]
    with tempfile.TemporaryDirectory(prefix="rollmill-gpu-kit-") as made:
        build(Path(made) / "model", 1, **size["model"])
        yield asdict(gpu_run.play(Path(made), "shared", place.device, place.size(4, 3), size))


# --- The engine, the vocabulary head and packed attention on a GPU. Part of ``gpu_kit.py``, like ``_gpu_items.py``.


def engine(place: Place) -> Figures:
    causal_lm = place.model(place.shape("Qwen3-0.6B"), torch.bfloat16)
    yield {"tokens_per_s": asyncio.run(generated(place, causal_lm))}
    release(place)
    yield {"step": decoding(place, causal_lm)}


async def generated(place: Place, causal_lm: Any) -> float:
    """Tokens per second of 64 requests of 872 tokens that get 256 more, prefill included."""
    slots, prompt, more = (64, 872, 256) if not place.small else (4, 24, 8)
    serving = TorchEngine(
        causal_lm, num_slots=slots, context_length=place.size(2048, 64), device=place.device,
        stepping="eager" if place.small else "graph",
    )  # fmt: skip
    await serving.start()
    vocabulary, rng = causal_lm.config.vocab_size, np.random.default_rng(0)
    speeds = []
    try:
        for _ in range(2):
            requests = [
                GenerationRequest(
                    request_id=str(slot), prompt_ids=tuple(rng.integers(0, vocabulary, prompt).tolist()),
                    sampling=Sampling(max_new_tokens=more), stop_token_ids=(), seed=slot,
                )
                for slot in range(slots)
            ]  # fmt: skip
            began = time.perf_counter()
            await asyncio.gather(*(serving.generate(request) for request in requests))
            speeds.append(slots * more / (time.perf_counter() - began))
    finally:
        await serving.stop()
    return speeds[-1]


@torch.inference_mode()
def decoding(place: Place, causal_lm: Any) -> dict[str, Any]:
    """One decoding step at two contexts, and one prefill without and with tokens before it, by their kernels."""
    slots, context = (64, 2048) if not place.small else (4, 64)
    decoder = Decoder(
        causal_lm, num_slots=slots, context_length=context, device=place.device,
        stepping="eager" if place.small else "graph",
    )  # fmt: skip
    decoder.cache.kv.normal_(std=0.5)
    rows, told = np.arange(slots), {}
    decoder.cache.own(rows, np.zeros_like(rows), np.full(slots, context))
    for position in (context // 8, context * 7 // 8):
        step = partial(decoder.decode, rows, rows, np.full(slots, position))
        seconds = place.seconds(step, 10)
        busy, names = place.kernels(step)
        told[f"at_{position}"] = {
            "step_ms": 1e3 * seconds, "tokens_per_s": slots / seconds, "busy": busy / seconds,
            "gather": share_of(GATHERS, names), "attention": share_of(ATTENTION, names), "kernels_ms": top(names, 6),
        }  # fmt: skip
    few = rows[:4]
    tokens = torch.zeros((4, context // 2), dtype=torch.int64, device=place.device)
    for name, start in (("fresh", 0), ("behind_a_prefix", context // 2)):
        prefill = partial(decoder.extend, few, tokens, np.full(4, start), fresh=not start)
        _, names = place.kernels(prefill)
        told[f"prefill_{name}"] = {
            "ms": 1e3 * place.seconds(prefill), "attention": share_of(ATTENTION, names), "kernels_ms": top(names, 5)
        }  # fmt: skip
    return told


def head(place: Place) -> Figures:
    tokens, vocabulary, hidden = (16_384, 151_936, 4096) if not place.small else (64, 1000, 32)
    torch.manual_seed(0)
    dtype = torch.float32 if place.small else torch.bfloat16
    states = torch.randn(tokens, hidden, device=place.device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, hidden, device=place.device)).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=place.device)
    products, values = 4 * 2 * tokens * vocabulary * hidden, []

    def ours(chunk_tokens: int, chunk_vocabulary: int) -> torch.Tensor:
        logprobs = token_logprobs(states, weight, targets, 1.0, chunk_tokens, chunk_vocabulary)[0]
        torch.autograd.grad(logprobs.sum(), (states, weight))
        return logprobs

    def liger() -> torch.Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        loss = LigerFusedLinearCrossEntropyFunction.apply(states, weight, targets, None, None, -100, 0.0, 0.0, "sum")
        loss = loss[0] if isinstance(loss, tuple) else loss
        torch.autograd.grad(loss, (states, weight))
        return -loss[None] / tokens

    sizes = [(1024, 8192), (1024, 32_768), (1024, vocabulary), (4096, 8192), (4096, 32_768)]
    ways: dict[str, Callable[[], torch.Tensor]] = {f"{a}x{b}": partial(ours, a, b) for a, b in sizes}
    if not place.small:
        ways["liger"] = liger
    for name, work in ways.items():
        release(place)
        values.append(work().detach().float())
        seconds = place.seconds(work, 2)
        apart = (
            values[-1] - values[0] if len(values[-1]) == tokens else values[-1] - values[0].mean()
        )  # Liger's is a mean
        gap = float(apart.abs().max())
        peak = torch.cuda.max_memory_allocated() / GIB if place.device == "cuda" else 0.0
        yield {name: {"s": seconds, "tflops": products / seconds / 1e12, "gap": gap, "memory_peak_gib": peak}}
        if name != "liger" and not gap <= 1e-3:
            raise RuntimeError(f"log-probabilities in blocks of {name} are {gap:.2g} apart from those of the first")
    if place.device == "cuda":
        busy, names = place.kernels(partial(ours, 1024, 8192))
        yield {"kernels_ms": top(names), "busy_s": busy}


def varlen(place: Place) -> Figures:
    heads, dim, tokens = 32, 128, place.size(16_384, 256)
    for count, length in ((1, tokens), (8, tokens // 8), (64, tokens // 64)):
        spans = Documents.from_offsets(np.arange(0, count * length + 1, length), place.device)
        inputs = [
            torch.randn(1, n, count * length, dim, device=place.device, dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, heads // 4, heads // 4)
        ]
        kernel = "sdpa" if place.small else "varlen"
        forward = partial(documents_attention, torch.nn.Identity(), *inputs, documents=spans, kernel=kernel)
        upstream = torch.randn_like(forward()[0])

        def both(forward: Any = forward, inputs: Any = inputs, upstream: Any = upstream) -> None:
            torch.autograd.grad(forward()[0], inputs, upstream)

        with torch.no_grad():
            forward_s = place.seconds(forward, 5)
        both_s = place.seconds(both, 5)
        flops = 4 * spans.num_pairs * heads * dim
        yield {f"{count}x{length}": {
            "forward_tflops": flops / forward_s / 1e12, "backward_tflops": 2.5 * flops / (both_s - forward_s) / 1e12,
        }}  # fmt: skip

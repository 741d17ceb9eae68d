"""The items of ``gpu_kit.py``: each is a generator of figures, which the parent process keeps as they come.

On a CPU the same code runs with small shapes; its speeds and shares have no meaning then.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_run
from benchmarks._gpu_check_rank import documents, share
from benchmarks._gpu_place import Figures, Place, release, reserved, top
from benchmarks._gpu_weights import POLICY, RUN, VERSION_BYTES, OneHost
from benchmarks._processes import ROOT
from recipes.quickstart.model import build, build_tokenizer
from services.cli.check.memory import GIB, ModelShape, trainer_rank_parts
from services.common.config.training import PolicyConfig
from services.common.weights.snapshot import Manifest, TensorSpec
from services.inference.engine.base import WeightUpdate
from services.inference.engine.served.stage import FILE
from services.inference.engine.torch.decoder import prepare
from services.trainer.metrics import StepMetrics, peak_flops
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import Targets
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import AdapterSetup, PolicyModel, WithoutAdapter, build_policy_model
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks, init_ranks, leave_ranks
from services.trainer.step import TrainStep
from tests.documented import files

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
            peak_flops=peak_flops(self.ranks.device, torch.bfloat16, None),
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

"""Checks the parts that need this machine's GPU, and their speed: a Qwen3-architecture model with random weights.

    engine     the torch engine on the device: log-probabilities against a forward pass on the same device, before and
               after a weight update; tokens generated per second
    head       log-probabilities and gradients of the vocabulary head alone, at the vocabulary of Qwen3: bfloat16 operands
               as training has them, against float32 products of the same numbers
    trainer    FSDP2 ranks under torchrun (NCCL on GPUs, gloo on a CPU): loading by shards, then training steps in float32
               and with bfloat16 compute, with each attention kernel, and with optimizer and reference in host memory

Run it on a machine with a GPU and put the last line into docs/gpu.md:

    python benchmarks/gpu_check.py --device cuda
    python benchmarks/gpu_check.py --device cuda --ranks 8

On a CPU the same code runs with a small model, as a test of the code before a GPU is at hand; its speeds have no
meaning then:

    python benchmarks/gpu_check.py --quick --device cpu [--ranks 2]

``ours`` is the trainer's tokens per second with bfloat16 compute, ``theirs`` the same with SDPA document by document;
``problems`` lists the deviations; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._bench import median_and_spread, report
from services.common.records import Sampling
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import Generation, GenerationRequest, WeightUpdate
from services.inference.engine.torch.decoder import Stepping
from services.inference.engine.torch.engine import TorchEngine
from services.trainer.model.logprobs import token_logprobs

SIZES: dict[str, dict[str, int]] = {
    # The shape of Qwen3-0.6B with a smaller vocabulary.
    "gpu": {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "quick": {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip
HEADS = {
    "gpu": {"vocabulary": 151_936, "hidden": 4096, "tokens": 16_384},  # Qwen3-8B's head, one micro-batch
    "quick": {"vocabulary": 151_936, "hidden": 32, "tokens": 64},
}
GAP = {"float32": 2e-3, "bfloat16": 0.25}  # of log-probabilities: another order of sums, in that type
HEAD_GAP, HEAD_GRADIENT_GAP = 1e-3, 1e-2  # another order of sums; TF32's 10 bits
RANK_SCRIPT = Path(__file__).with_name("_gpu_check_rank.py")
TRAINER_TIMEOUT_S = 900


def build(size: str, seed: int = 0) -> Any:
    """A copy of the model of this seed."""
    return copy.deepcopy(_made(size, seed))


@functools.cache
def _made(size: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **SIZES[size])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


async def check_engine(
    size: str, device: str, dtype: torch.dtype, num_requests: int, repeats: int, stepping: Stepping
) -> dict[str, Any]:
    """Largest gap of log-probabilities to a forward pass before and after an update, and the speed."""
    first, second = build(size).to(dtype), build(size, seed=1).to(dtype)
    vocabulary = SIZES[size]["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocabulary, size=int(n)).tolist() for n in rng.integers(16, 128, size=num_requests)]
    served = build(size).to(dtype)
    engine = TorchEngine(served, num_slots=num_requests, context_length=512, device=device, stepping=stepping)
    await engine.start()
    speeds, gaps = [], []
    try:
        for version, model in enumerate((first, second)):
            if version:
                weights = {name: weight.clone() for name, weight in named_weights(second).items()}
                await engine.update(WeightUpdate.full(weights, version))
            model.to(device)
            for _ in range(repeats):
                began = time.perf_counter()
                made = await asyncio.gather(*(engine.generate(request(i, p)) for i, p in enumerate(prompts)))
                speeds.append(sum(len(m.token_ids) for m in made) / (time.perf_counter() - began))
            gaps.append(max(gap(model, p, m) for p, m in zip(prompts, made, strict=True)))
    finally:
        await engine.stop()
    speed, spread = median_and_spread(speeds)
    return {"tokens_per_s": speed, "spread": spread, "gap_before": gaps[0], "gap_after_update": gaps[1]}


def request(index: int, prompt: list[int]) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=64)
    return GenerationRequest(
        request_id=str(index), prompt_ids=tuple(prompt), sampling=sampling, stop_token_ids=(), seed=index
    )


@torch.no_grad()
def gap(model: Any, prompt: list[int], made: Generation) -> float:
    """Largest distance of the engine's log-probabilities from a forward pass on the same device."""
    ids = torch.tensor([prompt + list(made.token_ids)], device=model.device)
    rows = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double(), dim=-1)
    chosen = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    return float(np.abs(chosen - np.concatenate([segment.logprobs for segment in made.segments])).max())


def check_head(size: str, device: str, repeats: int) -> dict[str, Any]:
    """Seconds of a forward and backward pass in each type, and how far bfloat16 operands are from float32 products."""
    shape = HEADS[size]
    generator = torch.Generator(device).manual_seed(0)
    numbers = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(shape["tokens"], shape["hidden"], **numbers)  # type: ignore[call-overload]
    weight = torch.randn(shape["vocabulary"], shape["hidden"], **numbers) * shape["hidden"] ** -0.5  # type: ignore[call-overload]
    targets = torch.randint(shape["vocabulary"], (shape["tokens"],), generator=generator, device=device)
    said: dict[str, Any] = dict(shape)
    results = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        operands = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            logprobs, _ = token_logprobs(operands[0], operands[1], targets)
            gradients = torch.autograd.grad(logprobs.sum(), operands)
            float(logprobs[0].detach()) + float(gradients[0][0, 0])  # waits for the device
            seconds.append(time.perf_counter() - began)
        results[name] = [tensor.detach().float() for tensor in (logprobs, *gradients)]
        said[f"{name}_s"], said[f"{name}_spread"] = median_and_spread(seconds[1:])
        # Logits twice, the gradients of hidden states and weights once each.
        products = 4 * 2 * shape["tokens"] * shape["vocabulary"] * shape["hidden"]
        said[f"{name}_tflops"] = products / said[f"{name}_s"] / 1e12
    (half, *half_gradients), (plain, *gradients) = results["bfloat16"], results["float32"]
    said["gap"] = float((half - plain).abs().max())
    said["gradient_gap"] = max(
        float((one - other).norm() / other.norm()) for one, other in zip(half_gradients, gradients, strict=True)
    )
    return said


def check_trainer(model: Path, options: argparse.Namespace, steps: int, tokens: int) -> dict[str, Any]:
    """The output of the first rank; raises ``RuntimeError`` with the last output of the ranks."""
    out = model / f"ranks{options.ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command += [str(RANK_SCRIPT), str(model), str(out), "--device", options.device]
    command += ["--steps", str(steps), "--tokens", str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TRAINER_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"the trainer's ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
    said: dict[str, Any] = json.loads(out.read_text())
    return said


def problems(engine: dict[str, dict[str, Any]], head: dict[str, Any], trainer: dict[str, Any]) -> list[str]:
    found = [
        f"engine in {way}: {name} is {said[name]:.2g}, more than {limit:g}"
        for way, said in engine.items()
        for name, limit in ((gap_name, GAP[way.partition("_")[0]]) for gap_name in ("gap_before", "gap_after_update"))
        if not said[name] <= limit
    ]
    found += [
        f"head: {name} between bfloat16 and float32 operands is {head[name]:.2g}, more than {limit:g}"
        for name, limit in (("gap", HEAD_GAP), ("gradient_gap", HEAD_GRADIENT_GAP))
        if not head[name] <= limit
    ]
    plain, half, by_runs, offloaded = (
        trainer[way] for way in ("float32", "bfloat16", "bfloat16_sdpa", "bfloat16_offload")
    )
    if offloaded["losses"][0] != half["losses"][0]:
        found.append(f"trainer: the first loss with offload is {offloaded['losses'][0]}, without {half['losses'][0]}")
    for name, other in (("bfloat16", half), ("bfloat16_sdpa", by_runs)):
        apart = abs(other["grad_norms"][0] / plain["grad_norms"][0] - 1)
        if not apart < 0.1:
            found.append(f"trainer: the first gradient in {name} is {apart:.1%} away from float32's")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks; on cuda one per GPU")
    parser.add_argument("--quick", action="store_true", help="a small model; a minute on a CPU")
    options = parser.parse_args()
    size = "quick" if options.quick or options.device == "cpu" else "gpu"
    torch.set_num_threads(1)
    small = size == "quick"
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if options.device == "cuda" else {})
    ways: tuple[Stepping, ...] = ("eager", "graph", "compiled") if options.device == "cuda" else ("eager",)
    engine = {
        name if way == "eager" else f"{name}_{way}": asyncio.run(
            check_engine(size, options.device, dtype, 8 if small else 64, 1 if small else 3, way)
        )
        for name, dtype in dtypes.items()
        for way in ways
    }
    head = check_head(size, options.device, 1 if small else 5)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the ranks want it
    with tempfile.TemporaryDirectory(prefix="rollmill-gpu-check-") as directory:
        build(size).save_pretrained(directory)
        trainer = check_trainer(Path(directory), options, 2 if small else 5, 2048 if small else 32_768)
    wrong = problems(engine, head, trainer)
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else None
    ours, theirs = trainer["bfloat16"]["tokens_per_s"], trainer["bfloat16_sdpa"]["tokens_per_s"]
    report(
        "gpu_check", ours=ours, theirs=theirs, ratio=ours / theirs, spread=engine["float32"]["spread"],
        device=options.device, gpu=gpu, torch=torch.__version__, at=datetime.now(UTC).strftime("%Y-%m-%d"),
        size=size, engine=engine, head=head, trainer=trainer, problems=wrong,
    )  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

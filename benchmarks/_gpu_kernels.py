"""The engine, the vocabulary head and packed attention on a GPU. Part of ``gpu_kit.py``, like ``_gpu_items.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks._gpu_place import ATTENTION, GATHERS, Figures, Place, release, share_of, top
from services.cli.check.memory import GIB
from services.common.records import Sampling
from services.inference.engine.base import GenerationRequest
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.engine import TorchEngine
from services.trainer.model.attention import Documents, documents_attention
from services.trainer.model.logprobs import token_logprobs


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

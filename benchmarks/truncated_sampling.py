"""Measures the cost of the record of truncated sampling: bytes per token, engine tokens per second, seconds of the
trainer's head.

* bytes: sets that top-k 50 and top-p .95 keep of synthetic logits over 150,000 tokens, packed as a segment carries them
  and as the journal writes them, beside the 8 bytes of a token's id and log-probability. Logits are normal; their
  deviation is drawn per token so that entropies spread over the range of language models, from 0 to 8 nats.
* engine: the torch engine's tokens per second by CPU time, top-k 50 and top-p .95, with the record (ours) and without
  (theirs), and without truncation.
* head: forward and backward of the trainer's chunked head over 150,000 tokens, with sets (ours) and without (theirs).

    python benchmarks/truncated_sampling.py [--quick] [--threads 1] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._report import median_and_spread, report_facts
from benchmarks._workload import MODELS
from services.common.kept_tokens import KeptSets, pack, unpack
from services.common.records import Sampling
from services.inference.engine.base import GenerationRequest
from services.inference.engine.torch.engine import TorchEngine
from services.inference.engine.torch.slots import SamplingRows, sample
from services.trainer.model.logprobs import Drawn, KeptBlocks, token_logprobs

VOCAB = 150_000
BATCH = 64
TOP_P, TOP_K = 0.95, 50
DEVIATIONS = (1.5, 12.0)  # of logits: about 8 nats of entropy, and next to none


def draw(num_tokens: int, seed: int, top_p: float, top_k: int) -> tuple[bytes, np.ndarray]:
    """Sets of synthetic tokens, packed, and the tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = [], []
    for start in range(0, num_tokens, BATCH):
        count = min(BATCH, num_tokens - start)
        spread = torch.empty(count, 1).uniform_(*DEVIATIONS, generator=generator)
        drawn = sample(
            torch.randn(count, VOCAB, generator=generator) * spread,
            SamplingRows(
                temperature=np.ones(count, np.float32),
                top_p=np.full(count, top_p, np.float32),
                top_k=np.full(count, top_k),
                min_p=np.zeros(count, np.float32),
                suppress_stop=np.zeros(count, bool),
                stop_ids=np.full((count, 1), -1),
                uniform=torch.rand(count, generator=generator, dtype=torch.float64).numpy(),
                record=np.ones(count, bool),
            ),
        )
        rows += [drawn.kept[row] for row in range(count)]
        tokens.append(drawn.tokens)
    return pack(rows, num_tokens), np.concatenate(tokens).astype(np.int32)


def sizes(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    found = []
    for top_p, top_k in ((TOP_P, TOP_K), (TOP_P, 0)):
        packed, tokens = draw(num_tokens, seed, top_p, top_k)
        began = time.perf_counter()
        sets = unpack(packed, tokens)
        unpack_s = time.perf_counter() - began
        counts = np.bincount(sets.rows, minlength=num_tokens)
        found.append({
            "top_p": top_p, "top_k": top_k, "tokens": num_tokens, "kept_mean": float(counts.mean()),
            "alone_share": float((counts == 1).mean()), "bytes_per_token": len(packed) / num_tokens,
            "journal_bytes_per_token": len(base64.b64encode(packed)) / num_tokens,
            "unpack_us_per_token": 1e6 * unpack_s / num_tokens,
        })  # fmt: skip
    return found


def engine_cost(model: Any, length: int, seed: int, *, cut: bool, record: bool) -> float:
    """CPU seconds per token of 64 requests side by side."""

    async def measure() -> float:
        engine = TorchEngine(model, num_slots=BATCH, context_length=length + 64)
        await engine.start()
        sampling = Sampling(max_new_tokens=length, top_p=TOP_P if cut else 1.0, top_k=TOP_K if cut else 0)
        requests = [
            GenerationRequest(
                request_id=str(i),
                prompt_ids=tuple(range(1, 33)),
                sampling=sampling,
                stop_token_ids=(),
                seed=seed + i,
                record_kept=record,
            )
            for i in range(BATCH)
        ]
        began = time.process_time()
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds = time.process_time() - began
        await engine.stop()
        assert all(bool(s.kept) == (cut and record) for r in results for s in r.segments)
        return seconds / (BATCH * length)

    return asyncio.run(measure())


def head_cost(num_tokens: int, sets: KeptSets | None, tokens: np.ndarray, width: int = 256) -> float:
    """Seconds of one forward and backward pass over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
    weight = (2 / width**0.5 * torch.randn(VOCAB, width, generator=generator)).requires_grad_()
    drawn = None if sets is None else Drawn(kept=KeptBlocks.on(sets, torch.device("cpu")), temperatures=None)
    began = time.perf_counter()
    logprobs, _ = token_logprobs(hidden, weight, torch.as_tensor(tokens, dtype=torch.int64), 1.0, 256, drawn=drawn)
    logprobs.sum().backward()
    return time.perf_counter() - began


def interleaved(arms: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    for arm in arms.values():
        arm()  # warm
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repetitions):
        for name, arm in arms.items():
            found[name].append(arm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: at most 60 s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = sizes(128 if options.quick else 2048, options.seed)
    for row in size:
        print(row)
    torch.manual_seed(options.seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **MODELS["small"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    length, repetitions = (24, 3) if options.quick else (128, 5)
    engine = interleaved(
        {
            "whole": lambda: engine_cost(model, length, options.seed, cut=False, record=True),
            "cut": lambda: engine_cost(model, length, options.seed, cut=True, record=False),
            "cut_and_recorded": lambda: engine_cost(model, length, options.seed, cut=True, record=True),
        },
        repetitions,
    )
    tokens_per_s = {name: 1 / statistics.median(costs) for name, costs in engine.items()}
    ratio, spread = median_and_spread([a / b for a, b in zip(engine["cut"], engine["cut_and_recorded"], strict=True)])
    print(f"engine {tokens_per_s}, with the record {ratio:.3f} ±{spread:.0%} of without")
    num_tokens = 64 if options.quick else 256
    packed, tokens = draw(num_tokens, options.seed, TOP_P, TOP_K)
    sets = unpack(packed, tokens)
    head = interleaved(
        {"whole": lambda: head_cost(num_tokens, None, tokens), "cut": lambda: head_cost(num_tokens, sets, tokens)},
        repetitions,
    )
    head_ratio, head_spread = median_and_spread([a / b for a, b in zip(head["cut"], head["whole"], strict=True)])
    print(f"head: {statistics.median(head['cut']):.3f} s with sets, {head_ratio:.3f} ±{head_spread:.0%} of without")
    report_facts(
        "truncated_sampling",
        ours=tokens_per_s["cut_and_recorded"],
        theirs=tokens_per_s["cut"],
        ratio=ratio,
        spread=spread,
        unit="generated tokens per CPU second",
        engine_tokens_per_s=tokens_per_s,
        sizes=size,
        head_seconds={name: statistics.median(values) for name, values in head.items()},
        head_ratio=head_ratio,
        head_spread=head_spread,
        seed=options.seed,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()

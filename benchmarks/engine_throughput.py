"""Generated tokens per second: the torch engine against padded transformers ``generate``.

Same model, same prompts, same lengths, same number of threads, sampled at temperature 1. Lengths are fixed in
advance for both. ``generate`` gets batches of 64 sorted by their *output* length, which a real run cannot know, and
computes no log-probabilities; a batch runs to its longest row, and only tokens that were asked for count. The engine
has 64 slots, gets all requests at once in random order, and returns log-probabilities and versions.

    python benchmarks/engine_throughput.py [--quick] [--threads 1] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import median_and_spread, report
from _workload import MODELS, Workload
from transformers import AutoModelForCausalLM, Qwen3Config

from services.common.types import Sampling
from services.inference.engine.base import GenerationRequest
from services.inference.engine.torch_engine import TorchEngine

BATCH = 64


def build_model(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def run_ours(model: Any, prompts: list[list[int]], lengths: list[int], seed: int) -> float:
    """Seconds for all requests through the engine."""

    async def measure() -> float:
        engine = TorchEngine(model, num_slots=BATCH, context_length=max(map(len, prompts)) + max(lengths) + 1)
        await engine.start()
        requests = [
            GenerationRequest(
                request_id=str(i),
                prompt_ids=tuple(prompt),
                sampling=Sampling(max_new_tokens=length),
                stop_token_ids=(),
                seed=seed * 1_000_003 + i,
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        started = time.perf_counter()
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds = time.perf_counter() - started
        assert [len(result.token_ids) for result in results] == lengths
        await engine.stop()
        return seconds

    return asyncio.run(measure())


def run_theirs(model: Any, prompts: list[list[int]], lengths: list[int], seed: int) -> float:
    """Seconds for padded ``generate`` over batches sorted by output length."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: lengths[i])
    seconds = 0.0
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = max(len(prompts[i]) for i in rows)
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, i in enumerate(rows):
            input_ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        longest = max(lengths[i] for i in rows)
        begun = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds += time.perf_counter() - begun
        assert output.shape[1] == width + longest
    return seconds


def useful_share(lengths: list[int]) -> float:
    """Share of the row-steps of the sorted batches that make a token somebody asked for; 1 at equal lengths."""
    ordered = sorted(lengths)
    batches = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    return sum(lengths) / sum(len(batch) * batch[-1] for batch in batches)


def compare(model_name: str, workload: Workload, seed: int, repetitions: int) -> dict[str, Any]:
    prompts, lengths = workload.draw(MODELS[model_name]["vocab_size"], seed)
    # Two copies, since the engine re-lays the weights of the one it is given.
    arms: list[tuple[Callable[..., float], Any]] = [
        (run_ours, build_model(model_name, seed)),
        (run_theirs, build_model(model_name, seed)),
    ]
    for run, model in arms:
        run(model, prompts[:BATCH], [4] * len(prompts[:BATCH]), seed)
    speeds: list[list[float]] = [[], []]
    for repetition in range(repetitions):
        for arm, (run, model) in enumerate(arms):
            speeds[arm].append(sum(lengths) / run(model, prompts, lengths, seed + repetition))
    ratios = [ours / theirs for ours, theirs in zip(*speeds, strict=True)]
    (ours, _), (theirs, _), (ratio, spread) = (median_and_spread(values) for values in (*speeds, ratios))
    print(
        f"{model_name:11s}{workload.name:11s} ours {ours:8.0f}  generate {theirs:8.0f} tokens/s  ratio {ratio:.2f} ±{spread:.0%}"
    )
    return {
        "model": model_name, "workload": str(workload), "tokens": sum(lengths), "ours": ours, "theirs": theirs,
        "ratio": ratio, "spread": spread, "repetitions": repetitions, "generate_rows_useful": useful_share(lengths),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests: at most 60 s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        log_normal = Workload(name="log-normal", num_requests=256, median=20, sigma=1.0, longest=200)
        equal = Workload(name="equal", num_requests=64, median=64, sigma=0.0, longest=64)
        plan = [("small", log_normal, 2), ("small", equal, 2), ("quickstart", log_normal, 3), ("quickstart", equal, 3)]
    else:
        log_normal = Workload(name="log-normal", num_requests=256, median=96, sigma=1.0, longest=1024)
        equal = Workload(name="equal", num_requests=128, median=128, sigma=0.0, longest=128)
        plan = [(model, load, options.repetitions) for model in MODELS for load in (log_normal, equal)]
    results = [compare(model, load, options.seed, repetitions) for model, load, repetitions in plan]
    head = results[0]
    report(
        "engine_throughput",
        head["ours"],
        head["theirs"],
        head["ratio"],
        head["spread"],
        unit="generated tokens/s",
        seed=options.seed,
        threads=options.threads,
        targets={"log-normal": 1.8, "equal": 1.0},
        workloads=results,
    )


if __name__ == "__main__":
    main()

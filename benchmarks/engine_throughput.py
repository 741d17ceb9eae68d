"""Generated tokens per second: the torch engine against padded transformers ``generate``.

Same model, same prompts, same lengths, same number of threads, sampled at temperature 1. Lengths are fixed in
advance for both. ``generate`` gets batches of 64 sorted by their *output* length, which a real run cannot know, and
computes no log-probabilities; a batch runs to its longest row, and only tokens that were asked for count. The engine
has 64 slots, gets all requests at once in random order, and returns log-probabilities and versions.

Speeds are by wall clock. ``cpu_ratio`` compares CPU seconds of the process instead: with one thread the two agree
on a quiet machine, and on a busy one only the second is to be trusted.

    python benchmarks/engine_throughput.py [--quick] [--threads 1] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._bench import median_and_spread, report
from benchmarks._workload import MODELS, Workload
from services.common.records import Sampling
from services.inference.engine.base import GenerationRequest
from services.inference.engine.torch.engine import TorchEngine

BATCH = 64


@dataclass
class Cost:
    """Wall and CPU seconds, summed over the blocks of ``counting``."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def build_model(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def run_ours(model: Any, prompts: list[list[int]], lengths: list[int], seed: int) -> Cost:
    """All requests through the engine."""

    async def measure() -> Cost:
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
        cost = Cost()
        with cost.counting():
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [len(result.token_ids) for result in results] == lengths
        await engine.stop()
        return cost

    return asyncio.run(measure())


def run_theirs(model: Any, prompts: list[list[int]], lengths: list[int], seed: int) -> Cost:
    """Padded ``generate`` over batches sorted by output length."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: lengths[i])
    cost = Cost()
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = max(len(prompts[i]) for i in rows)
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, i in enumerate(rows):
            input_ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        longest = max(lengths[i] for i in rows)
        with cost.counting(), torch.inference_mode():
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
        assert output.shape[1] == width + longest
    return cost


def useful_share(lengths: list[int]) -> float:
    """Share of the row-steps of the sorted batches that make a requested token; 1 at equal lengths."""
    ordered = sorted(lengths)
    batches = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    return sum(lengths) / sum(len(batch) * batch[-1] for batch in batches)


def compare(model_name: str, workload: Workload, seed: int, repetitions: int) -> dict[str, Any]:
    prompts, lengths = workload.draw(MODELS[model_name]["vocab_size"], seed)
    # Two copies, since the engine re-lays the weights of the one it is given.
    arms: list[tuple[Callable[..., Cost], Any]] = [
        (run_ours, build_model(model_name, seed)),
        (run_theirs, build_model(model_name, seed)),
    ]
    for run, model in arms:
        run(model, prompts[:BATCH], [4] * len(prompts[:BATCH]), seed)
    costs: list[list[Cost]] = [[], []]
    for repetition in range(repetitions):
        for arm, (run, model) in enumerate(arms):
            costs[arm].append(run(model, prompts, lengths, seed + repetition))
    ours, theirs = (median_and_spread([sum(lengths) / cost.wall for cost in arm])[0] for arm in costs)
    pairs = list(zip(*costs, strict=True))
    ratio, spread = median_and_spread([b.wall / a.wall for a, b in pairs])
    cpu_ratio, cpu_spread = median_and_spread([b.cpu / a.cpu for a, b in pairs])
    print(
        f"{model_name:11s}{workload.name:11s} ours {ours:8.0f}  generate {theirs:8.0f} tokens/s  ratio {ratio:.2f} ±{spread:.0%}"
        f"  by CPU time {cpu_ratio:.2f} ±{cpu_spread:.0%}"
    )
    return {
        "model": model_name, "workload": str(workload), "tokens": sum(lengths), "ours": ours, "theirs": theirs,
        "ratio": ratio, "spread": spread, "cpu_ratio": cpu_ratio, "cpu_spread": cpu_spread, "repetitions": repetitions,
        "generate_rows_useful": useful_share(lengths),
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
        cpu_ratio=head["cpu_ratio"],
        unit="generated tokens/s",
        seed=options.seed,
        threads=options.threads,
        targets={"log-normal": 1.8, "equal": 1.0},
        workloads=results,
    )


if __name__ == "__main__":
    main()

"""The paged KV cache of the torch engine: memory of a group, throughput in little memory.

``group``: 16 samples of one prompt, which end together. Bytes that the positions of the group occupy, each sample apart and
in blocks. ``bound``: the requests of engine_throughput.py through pools of a share of the memory that the slots can fill. Arms alternate; speeds are tokens per CPU second of the process, because wall clock depends on the machine's load.

    python benchmarks/kv_blocks.py [--quick] [--seed 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._report import median_and_spread, report
from benchmarks._workload import MODELS, Workload
from services.common.config.processes import BLOCK_TOKENS, least_blocks
from services.common.records import Sampling
from services.inference.engine.base import Generation, GenerationRequest, KvPolicy
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.engine import Core, Entry
from services.inference.engine.torch.slots import SlotTable

GROUP = 16
SLOTS = 64


class Arm:
    """A core that is stepped without a thread."""

    def __init__(self, model: str, num_slots: int, context: int, seed: int, share: float | None = None) -> None:
        torch.manual_seed(seed)
        config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=16_384, **MODELS[model])
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        width = config.num_key_value_heads * config.head_dim
        self.token_bytes = config.num_hidden_layers * 2 * width * 4
        limit = None
        if share is not None:
            whole = num_slots * context * self.token_bytes
            limit = max(int(share * whole), least_blocks(context) * BLOCK_TOKENS * self.token_bytes)
        decoder = Decoder(built, num_slots=num_slots, context_length=context, kv_bytes=limit)
        self.core = Core(decoder, SlotTable(num_slots, context), kv_policy=KvPolicy.RECOMPUTE, version=0)
        self.most_used = 0

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], seed: int) -> tuple[float, list[Generation]]:
        """CPU seconds, and the generations in the order of the prompts."""
        made: dict[str, Any] = {}
        began = time.process_time()
        with torch.inference_mode():
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                request = GenerationRequest(
                    request_id=str(index),
                    prompt_ids=tuple(prompt),
                    sampling=Sampling(max_new_tokens=length),
                    stop_token_ids=(),
                    seed=seed * 1_000_003 + index,
                )
                self.core.submit(
                    Entry(request=request, done=lambda found, key=str(index): made.__setitem__(key, found))
                )  # type: ignore[misc]
            while self.core.has_work:
                self.core.step()
                self.most_used = max(self.most_used, self.core.kv.use.used)
        cost = time.process_time() - began
        return cost, [made[str(index)] for index in range(len(prompts))]


def group(num_prompt: int, num_new: int, seed: int) -> dict[str, Any]:
    arm = Arm("quickstart", GROUP, num_prompt + num_new + 1, seed)
    prompt = np.random.default_rng(seed).integers(0, MODELS["quickstart"]["vocab_size"], size=num_prompt).tolist()
    cost, _ = arm.run([prompt] * GROUP, [num_new] * GROUP, seed)
    apart_bytes = GROUP * (num_prompt + num_new) * arm.token_bytes
    blocks_bytes = arm.most_used * BLOCK_TOKENS * arm.token_bytes
    print(
        f"group of {GROUP} over {num_prompt} tokens: {apart_bytes / 1e6:.1f} MB apart, {blocks_bytes / 1e6:.1f} MB in blocks"
    )
    return {
        "prompt_tokens": num_prompt, "new_tokens": num_new, "apart_bytes": apart_bytes, "blocks_bytes": blocks_bytes,
        "memory_ratio": apart_bytes / blocks_bytes, "cpu_s": cost,
    }  # fmt: skip


def throughput(model: str, workload: Workload, arms: dict[str, Arm], seed: int, repetitions: int) -> dict[str, Any]:
    """Tokens per CPU second of each arm, and its ratio to the first one's, by pairs of runs that followed each other."""
    prompts, lengths = workload.draw(MODELS[model]["vocab_size"], seed)
    costs: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(repetitions):
        for name, arm in arms.items():
            arm.core.kv.forget()
            costs[name].append(arm.run(prompts, lengths, seed + repetition)[0])
    first = next(iter(arms))
    found: dict[str, Any] = {"model": model, "workload": str(workload)}
    for name, arm in arms.items():
        ratio, spread = median_and_spread([a / b for a, b in zip(costs[first], costs[name], strict=True)])
        speed = sum(lengths) / median_and_spread(costs[name])[0]
        counters = arm.core.counters
        found[name] = {
            "tokens_per_cpu_s": speed, "ratio": ratio, "spread": spread,
            "parked": counters.parked, "evicted": counters.evicted,
        }  # fmt: skip
        print(f"{model:11s}{workload.name:11s}{name:12s}{speed:8.0f} tokens/CPU s, ratio {ratio:.2f} ±{spread:.0%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests: at most 60 s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log_normal = Workload(name="log-normal", num_requests=256, median=20, sigma=1.0, longest=200)
    seed, times = options.seed, 2 if options.quick else 5
    grouped = group(8192, 16 if options.quick else 64, seed)
    context = 300
    pools = {f"pool {share:.0%}": Arm("quickstart", SLOTS, context, seed, share) for share in (1, 0.25, 0.1)}
    bound = throughput("quickstart", log_normal, pools, seed, times)
    report(
        "kv_blocks",
        float(grouped["blocks_bytes"]),
        float(grouped["apart_bytes"]),
        grouped["memory_ratio"],
        0.0,
        unit="bytes of KV of a group of 16 over one prompt of 8192 tokens",
        seed=seed,
        threads=options.threads,
        group=grouped,
        bound=bound,
    )


if __name__ == "__main__":
    main()

"""One rank of ``gpu_check.py``: loads a model by shards, trains a few steps in each way, and reports time and memory.

torchrun --nproc-per-node R benchmarks/_gpu_check_rank.py MODEL_DIR OUT.json --device cuda --steps 3 --tokens 8192
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.config.algorithm import M2po
from services.common.config.training import OptimizerConfig
from services.common.records import MinibatchTotals, RankBatch, Segment, StopReason, TokenSequence, TrainingSequence
from services.common.system.child import run_and_leave
from services.common.weights.snapshot import named_weights
from services.trainer.metrics import peak_flops
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks, init_ranks, leave_ranks, local_rows
from services.trainer.step import TrainStep

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"compute": torch.bfloat16},
    "bfloat16_sdpa": {"compute": torch.bfloat16, "attention": "sdpa"},
    "bfloat16_offload": {"compute": torch.bfloat16, "offload": True},
}


def sequences(num_tokens: int, vocabulary: int, seed: int) -> list[TrainingSequence]:
    """Prompts and answers of 64 to 512 tokens, half of each, in groups of four."""
    rng = np.random.default_rng(seed)
    halves: list[int] = []
    while 2 * sum(halves) < num_tokens:
        halves.append(int(rng.integers(32, 256)))
    return documents([(half, half) for half in halves], vocabulary, seed)


def documents(lengths: list[tuple[int, int]], vocabulary: int, seed: int) -> list[TrainingSequence]:
    """Sequences of one turn with these tokens of prompt and answer, in groups of four, half of them rewarded."""
    rng = np.random.default_rng(seed)
    made = []
    for index, (prompt, answer) in enumerate(lengths):
        segments = (
            Segment.environment(rng.integers(0, vocabulary, size=prompt)),
            Segment.policy(
                rng.integers(0, vocabulary, size=answer), rng.normal(-10.0, 0.1, size=answer), weight_version=0
            ),
        )
        made.append(
            TrainingSequence(
                sequence_id=str(index),
                sequence=TokenSequence(policy="p", segments=segments, reward=float(index % 2), stop_reason=StopReason.STOP),
                group_mean=0.5, group_std=0.58, group_size=4, staleness=0, minibatch=0, position=index,
            )
        )  # fmt: skip
    return made


def share(items: list[TrainingSequence], ranks: Ranks, step: int) -> RankBatch:
    totals = MinibatchTotals(
        num_sequences=len(items), num_trained_tokens=sum(item.sequence.num_trained_tokens for item in items)
    )
    own = tuple(items[ranks.rank :: ranks.world_size])
    return RankBatch(policy="p", training_step=step, minibatches=(totals,), sequences=own)


def train(path: Path, ranks: Ranks, options: argparse.Namespace, way: dict[str, Any]) -> dict[str, Any]:
    """A few steps with a reference model, gradient checkpointing and the real optimizer."""
    offload, compute = bool(way.get("offload")), way.get("compute")
    settings = {"compute_dtype": compute, "attention": way.get("attention", "auto")}
    began = time.perf_counter()
    model = load_policy_model(path, ranks, gradient_checkpointing=True, **settings)
    loaded_s = time.perf_counter() - began
    step = TrainStep(
        model,
        PolicyOptimizer(model.named_parameters(), OptimizerConfig(lr=1e-5), offload=offload),
        M2po(kl_coefficient=0.001),
        ranks,
        max_tokens_per_micro_batch=max(512, options.tokens // 2),
        reference=load_policy_model(path, ranks, trainable=False, offload=offload, **settings),
        peak_flops=peak_flops(ranks.device, compute or torch.float32),
    )
    vocabulary = model.causal_lm.config.vocab_size
    told = [
        step.run(share(sequences(options.tokens, vocabulary, number), ranks, number)) for number in range(options.steps)
    ]
    bits = hashlib.sha256()
    for _, weight in sorted(named_weights(model.causal_lm).items()):
        bits.update(local_rows(weight)[0].cpu().numpy().tobytes())
    last = told[-1]
    return {
        "load_s": loaded_s,
        "losses": [metrics.loss for metrics in told],
        "grad_norms": [metrics.grad_norm for metrics in told],
        "tokens_per_s": last.tokens_per_second,
        "tflops_per_rank": last.tflops,
        "mfu": last.mfu,
        "memory_peak_gib": last.memory_peak_gib,
        "weights": bits.hexdigest()[:16],  # of this rank's rows
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = init_ranks(timeout_s=300.0, device=options.device, always_group=True)
    told = {name: train(options.model, ranks, options, way) for name, way in WAYS.items()}
    if ranks.is_first:
        backend = torch.distributed.get_backend()
        options.out.write_text(json.dumps({"ranks": ranks.world_size, "backend": backend, **told}))
    leave_ranks()
    return 0


if __name__ == "__main__":
    run_and_leave(main)

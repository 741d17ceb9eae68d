"""Measures the cost of the zero-gradient audit: seconds of a training step with the audit, and of the audit alone.

A whole RL step (M2PO, two minibatches, packed, forward, backward, update) over a tiny model, as in
``trainer_packing.py``: the smaller the model, the larger the audit's share. *Alone* times the audit's own calls inside
the same steps, which says more than the difference of two noisy steps: the share is their sum over the rest of the
step. Also the ratio of whole steps without and with the audit, interleaved.

    python benchmarks/audit_cost.py [--quick] [--threads 1] [--seed 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import services.trainer.step.train_step as step_module
from benchmarks._report import median_and_spread, report
from benchmarks._workload import MODELS, Workload
from benchmarks.trainer_packing import MAX_TOKENS, build_model
from services.common.config.training.losses import M2po
from services.common.config.training.optimizer import OptimizerConfig
from services.common.records.types import MinibatchTotals, RankBatch, Segment, Sequence, StopReason, TrainingSequence
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import build_policy_model
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.metrics import GradientAudit
from services.trainer.step.train_step import TrainStep

MINIBATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_sequences, repetitions = (32, 4) if options.quick else (128, 12)
    results = [measure(name, num_sequences, repetitions, options.seed) for name in MODELS]
    worst = max(results, key=lambda result: result["alone_share"])
    report(
        "audit_cost", worst["with_s"], worst["without_s"], worst["without_s"] / worst["with_s"], worst["spread"],
        unit="seconds of a training step", alone_share=worst["alone_share"], target={"alone_share": 0.01},
        seed=options.seed, threads=options.threads, models=results,
    )  # fmt: skip


def measure(model_name: str, num_sequences: int, repetitions: int, seed: int) -> dict[str, Any]:
    workload = Workload(name="log-normal", num_requests=num_sequences, median=96, sigma=1.0, longest=1024)
    batch = draw_batch(workload, MODELS[model_name]["vocab_size"], seed)
    ranks = Ranks.single()
    model = build_policy_model(build_model(model_name, seed), ranks)
    optimizer = PolicyOptimizer(model.named_parameters(), OptimizerConfig(lr=1e-6))
    step = TrainStep(model, optimizer, M2po(), ranks, max_tokens_per_micro_batch=MAX_TOKENS)
    step.run(batch)  # the first pays for allocations
    seconds: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    for repetition in range(repetitions):
        for audited in (True, False) if repetition % 2 else (False, True):
            spent = [0.0]
            with timed(spent) if audited else switched_off():
                began = time.perf_counter()
                step.run(batch)
                took = time.perf_counter() - began
            seconds[audited].append(took)
            if audited:
                shares.append(spent[0] / (took - spent[0]))
    share, spread = median_and_spread(shares)
    with_s, without_s = (median_and_spread(seconds[audited])[0] for audited in (True, False))
    print(f"{model_name:11s} step {with_s:.3f} s, without the audit {without_s:.3f} s; the audit alone {share:.3%}")
    return {"model": model_name, "with_s": with_s, "without_s": without_s, "alone_share": share, "spread": spread,
            "trained_tokens": sum(m.num_trained_tokens for m in batch.minibatches)}  # fmt: skip


def draw_batch(workload: Workload, vocab_size: int, seed: int) -> RankBatch:
    prompts, lengths = workload.draw(vocab_size, seed)
    random = np.random.default_rng(seed + 1)
    sequences = []
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens = random.integers(0, vocab_size, length, dtype=np.int32)
        spoken = Segment.policy(tokens, random.normal(-6.0, 0.3, length).astype(np.float32), weight_version=0)
        sequence = Sequence(
            policy="p",
            segments=(Segment.environment(prompt), spoken),
            reward=float(number % 2),
            stop_reason=StopReason.STOP,
        )
        sequences.append(
            TrainingSequence(
                sequence_id=f"g{number // 8}/{number % 8}/0", sequence=sequence, group_mean=0.5, group_std=0.5,
                group_size=8, staleness=0, minibatch=number % MINIBATCHES, position=number,
            )
        )  # fmt: skip
    totals = tuple(
        MinibatchTotals(
            num_sequences=sum(s.minibatch == m for s in sequences),
            num_trained_tokens=sum(s.sequence.num_trained_tokens for s in sequences if s.minibatch == m),
        )
        for m in range(MINIBATCHES)
    )
    return RankBatch(policy="p", training_step=1, minibatches=totals, sequences=tuple(sequences))


class NoAudit(GradientAudit):
    """An audit that does no work."""

    @staticmethod
    def view(logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs

    def count(self, *args: Any) -> None:
        pass

    def add_to(self, *args: Any) -> None:
        pass


@contextmanager
def switched_off() -> Iterator[None]:
    with replaced({"GradientAudit": NoAudit, "add_ratios": lambda *a: torch.zeros(()), "shares": lambda *a: {}}):
        yield


@contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            spent[0] += time.perf_counter() - began
            return result

        return wrapper

    class Timed(GradientAudit):
        view = staticmethod(clocked(GradientAudit.view))
        count = clocked(GradientAudit.count)
        add_to = clocked(GradientAudit.add_to)

    names = ("add_ratios", "shares")
    with replaced({"GradientAudit": Timed, **{name: clocked(getattr(step_module, name)) for name in names}}):
        yield


@contextmanager
def replaced(names: dict[str, Any]) -> Iterator[None]:
    """These names of the step's module for a while."""
    before = {name: getattr(step_module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(step_module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(step_module, name, value)


if __name__ == "__main__":
    main()

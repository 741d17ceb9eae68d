"""The advantage of each sequence of a rollout, from the statistics that the batch record has of its group.

The trainer computes advantages and records none; those that need the reward and the group alone are computed here by
its own function. Others are named instead: they need values of a critic, of a teacher, or the rewards of a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config.training.algorithm import AlgorithmConfig
from services.common.records.types import Sequence, StopReason, TrainingSequence
from services.orchestrator.state.groups import split_sequence_id

Json = dict[str, Any]


def uses(record: Json, batches: list[Json], algorithms: Mapping[str, AlgorithmConfig]) -> dict[int, Json]:
    """By position of the sequence in the trajectory ``record``: training step, staleness, statistics of the group, and the
    ``advantage``, or ``why`` it is not known."""
    found: dict[int, Json] = {}
    for batch in batches:
        for entry in batch["sequences"]:
            group, slot, position = split_sequence_id(entry["sequence_id"])
            if (group, slot) != (record["task_group_id"], record["index"]) or position in found:
                continue
            of_policy = algorithms.get(batch["policy"])
            reward = entry["reward"] if entry["reward"] is not None else record["sequences"][position]["reward"]
            advantage, why = (None, "its policy is not in the recipe")
            if of_policy is not None:
                advantage, why = _advantage(entry, float(reward), of_policy)
            found[position] = {
                "step": batch["training_step"],
                "minibatch": entry["minibatch"],
                "staleness": entry["staleness"],
                "trained_reward": reward,
                "group_mean": entry["group_mean"],
                "group_std": entry["group_std"],
                "group_size": entry["group_size"],
                "trained_from": entry.get("trained_from", 0),
                "advantage": advantage,
                "why": why,
            }
    return found


def _advantage(entry: Json, reward: float, algorithm: AlgorithmConfig) -> tuple[float | None, str]:
    if algorithm.distillation is not None:
        return None, "the trainer computes it for each token from the teacher's log-probability"
    if algorithm.advantage == "gae":
        return None, "the trainer computes it for each token from the values of the critic"
    if algorithm.deviation == "batch":
        return None, "the trainer divides it by the deviation of its whole batch"
    try:
        from services.trainer.algorithms.advantages.sequences import sequence_advantages
    except ImportError:  # a machine that only reads runs
        return None, "the trainer's packages are not installed here"
    sequence = Sequence(policy="", role="", attempt=0, segments=(), reward=reward, stop_reason=StopReason.STOP)
    stamped = TrainingSequence(
        sequence_id=entry["sequence_id"], sequence=sequence, group_mean=entry["group_mean"], group_std=entry["group_std"],
        group_size=entry["group_size"], staleness=0, minibatch=0, position=0,
    )  # fmt: skip
    note = "before the normalisation over the batch" if algorithm.batch_normalize_advantages else ""
    if algorithm.gamma != 1.0 or algorithm.kl_reward_coefficient:
        note = "of the last token: the trainer discounts it, or takes the KL off, for each token"
    return float(sequence_advantages([stamped], algorithm)[0]), note

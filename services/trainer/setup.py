"""Builds the training step of a policy from its section of the recipe. Used by the trainer and by offline replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from services.common.checkpoints.directory import checkpoints_directory
from services.common.config.recipe import Recipe
from services.common.devices import chosen_device
from services.common.models import check_model_matches, check_same_vocabulary, load_tokenizer
from services.trainer.checkpoint import CheckpointIdentity, Checkpoints
from services.trainer.model import PolicyModel, load_policy_model
from services.trainer.optimizer import PolicyOptimizer
from services.trainer.sharding import Ranks, init_ranks
from services.trainer.step import TrainStep
from services.trainer.usage import peak_flops
from services.trainer.value_head import own_rates

# How long ranks wait for the first, which waits for the orchestrator; a rank that dies is noticed at once.
COLLECTIVE_TIMEOUT_S = 1800.0


def join_ranks(recipe: Recipe, policy: str) -> Ranks:
    """This process's place among the ranks, with threads and device as the recipe wants them."""
    config = recipe.policies[policy].trainer
    torch.set_num_threads(config.threads)
    return init_ranks(
        timeout_s=COLLECTIVE_TIMEOUT_S,
        device=chosen_device(config.device, f"policies.{policy}.trainer.device"),
        always_group=config.compute_dtype != config.master_dtype or "reference" in config.offload,
    )


def build_step(recipe: Recipe, policy: str, path: str, ranks: Ranks) -> tuple[TrainStep, Any]:
    """The training step of a policy at its starting checkpoint, and the tokenizer that lies beside it.

    Raises:
        ConfigError: there is no model or no tokenizer at ``path``.
        ModelMismatchError: the tokenizer has ids that the model lacks, or a teacher has another one.
    """
    config = recipe.policies[policy]
    tokenizer = load_tokenizer(path)
    master: torch.dtype = getattr(torch, config.trainer.master_dtype)
    same = config.trainer.compute_dtype == config.trainer.master_dtype
    compute: torch.dtype | None = None if same else getattr(torch, config.trainer.compute_dtype)
    torch.manual_seed(recipe.run.seed)
    model = load_policy_model(
        path,
        ranks,
        dtype=master,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        compute_dtype=compute,
        attention=config.trainer.attention,
        value_head=config.algorithm.value_head is not None,
    )
    check_model_matches(model.causal_lm, tokenizer=tokenizer)

    def frozen(source: str) -> PolicyModel:
        return load_policy_model(
            source,
            ranks,
            dtype=master,
            trainable=False,
            compute_dtype=compute,
            attention=config.trainer.attention,
            offload="reference" in config.trainer.offload,
        )

    distillation = config.algorithm.distillation
    teacher = None
    if distillation is not None and distillation.teacher_model is not None:
        # Before its weights: those may take long to load.
        check_same_vocabulary(
            tokenizer, load_tokenizer(distillation.teacher_model), f"the teacher {distillation.teacher_model}"
        )
        teacher = frozen(distillation.teacher_model)
        check_model_matches(teacher.causal_lm, tokenizer=tokenizer)
    step = TrainStep(
        model,
        PolicyOptimizer(
            model.named_parameters(),
            recipe.optimizer(policy),
            offload="optimizer" in config.trainer.offload,
            rates=own_rates(config.algorithm.value_head),
        ),
        config.algorithm,
        ranks,
        max_tokens_per_micro_batch=config.trainer.token_budget,
        temperature=recipe.sampling.temperature,
        reference=frozen(path) if config.algorithm.needs_reference else None,
        teacher=teacher,
        peak_flops=peak_flops(ranks.device, compute or master, config.trainer.peak_tflops),
    )
    return step, tokenizer


def open_checkpoints(
    recipe: Recipe,
    policy: str,
    run_dir: Path,
    ranks: Ranks,
    model_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Checkpoints:
    """The checkpoints of a policy in a run directory. ``model_files`` go into those that are written."""
    assert recipe.run.id is not None
    return Checkpoints(
        checkpoints_directory(run_dir, policy),
        CheckpointIdentity(run_id=recipe.run.id, policy=policy),
        recipe.policies[policy].trainer.keep_checkpoints,
        ranks,
        model_files,
    )

"""Builds the training step of a policy from its section of the recipe, for the trainer and for offline replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from services.common.checkpoints import checkpoints_directory
from services.common.config.recipe import Recipe
from services.common.lora import identity_of
from services.common.system.devices import chosen_device, log_device
from services.common.text.huggingface import check_model_matches, check_same_vocabulary, load_tokenizer
from services.trainer.checkpoints import CheckpointIdentity, Checkpoints
from services.trainer.model.adapter import AdapterSetup, WithoutAdapter, digest_base
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel, Scorer, load_policy_model
from services.trainer.model.value_head import own_rates
from services.trainer.ranks.sharding import Ranks, init_ranks
from services.trainer.step.metrics import peak_flops
from services.trainer.step.numerics import NumericsGate
from services.trainer.step.train_step import TrainStep

# Timeout of the ranks' wait for the first, which waits for the orchestrator; a dead rank is noticed at once.
COLLECTIVE_TIMEOUT_S = 1800.0


def join_ranks(recipe: Recipe, policy: str) -> Ranks:
    """Join the ranks of the trainer, with the recipe's threads and device."""
    device = chosen_device(recipe.policies[policy].trainer.device, f"policies.{policy}.trainer.device")
    config = recipe.with_devices(has_gpu=device == "cuda").policies[policy].trainer
    torch.set_num_threads(config.threads)
    ranks = init_ranks(
        timeout_s=COLLECTIVE_TIMEOUT_S,
        device=device,
        always_group=config.compute_dtype != config.master_dtype or "reference" in config.offload,
    )
    log_device(str(ranks.device), config.compute_dtype)
    return ranks


def build_step(recipe: Recipe, policy: str, path: str, ranks: Ranks) -> tuple[TrainStep, Any]:
    """Build the training step of a policy from its starting checkpoint, and load the tokenizer beside the model.

    Raises:
        ConfigError: no model or no tokenizer at ``path``.
        ModelMismatchError: the tokenizer has ids that the model lacks, a teacher has another tokenizer, or the trainer computes
            the model otherwise than the model itself.
    """
    recipe = recipe.with_devices(has_gpu=ranks.device.type == "cuda")
    config = recipe.policies[policy]
    tokenizer = load_tokenizer(path)
    master: torch.dtype = getattr(torch, config.trainer.master_dtype)
    same = config.trainer.compute_dtype == config.trainer.master_dtype
    compute: torch.dtype | None = None if same else getattr(torch, config.trainer.compute_dtype)
    model = _trained_model(recipe, policy, path, ranks, master, compute)
    if model.limit is not None:
        model.limit.check(config.model.context_length)
    check_model_matches(model.causal_lm, tokenizer=tokenizer)

    def frozen(source: str) -> PolicyModel:
        return load_policy_model(
            source,
            ranks,
            dtype=getattr(torch, config.trainer.frozen_dtype),
            trainable=False,
            compute_dtype=compute,
            attention=config.trainer.attention,
            logprob_chunk_tokens=config.trainer.logprob_chunk_tokens,
            offload="reference" in config.trainer.offload,
        )

    distillation = config.algorithm.distillation
    teacher = None
    if distillation is not None and distillation.teacher_model is not None:
        # Before the teacher's weights, which may take long to load.
        check_same_vocabulary(
            tokenizer, load_tokenizer(distillation.teacher_model), f"the teacher {distillation.teacher_model}"
        )
        teacher = frozen(distillation.teacher_model)
        check_model_matches(teacher.causal_lm, tokenizer=tokenizer)
    reference: Scorer | None = None
    if config.algorithm.needs_reference:
        reference = frozen(path) if config.adapter is None else WithoutAdapter(model)
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
        reference=reference,
        teacher=teacher,
        peak_flops=peak_flops(ranks.device, compute or master, config.trainer.peak_tflops),
    )
    return step, tokenizer


def numerics_gate(recipe: Recipe, policy: str, step: TrainStep, tokenizer: Any) -> NumericsGate:
    """The comparison of the policy's engines with its trainer."""
    recipe = recipe.with_devices(has_gpu=step.ranks.device.type == "cuda")
    bound, types = recipe.numerics(policy)
    return NumericsGate(step, tokenizer, policy, recipe.policies[policy].trainer.max_mismatch or bound, types)


def _trained_model(
    recipe: Recipe, policy: str, path: str, ranks: Ranks, master: torch.dtype, compute: torch.dtype | None
) -> PolicyModel:
    """The model with its adapter, if it has one. A collective."""
    config = recipe.policies[policy]
    torch.manual_seed(recipe.run.seed)
    adapter = None
    if config.adapter is not None:
        adapter = AdapterSetup(config=config.adapter, dtype=master, seed=recipe.run.seed)
    model = load_policy_model(
        path,
        ranks,
        dtype=master if adapter is None else compute or master,  # a frozen base needs no master copy
        gradient_checkpointing=config.trainer.gradient_checkpointing is True,
        compute_dtype=compute,
        attention=config.trainer.attention,
        logprob_chunk_tokens=config.trainer.logprob_chunk_tokens,
        value_head=config.algorithm.value_head is not None,
        adapter=adapter,
    )
    if adapter is not None:
        model.base = digest_base(model.causal_lm, ranks, recipe.digest_algorithm(policy), path)
        model.adapter = identity_of(model.causal_lm, adapter.config, model.base.digest)
    return model


def open_checkpoints(
    recipe: Recipe,
    policy: str,
    run_dir: Path,
    ranks: Ranks,
    model_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Checkpoints:
    """The checkpoints of a policy in a run directory. New checkpoints contain ``model_files``."""
    assert recipe.run.id is not None
    return Checkpoints(
        checkpoints_directory(run_dir, policy),
        CheckpointIdentity(run_id=recipe.run.id, policy=policy),
        recipe.policies[policy].trainer.keep_checkpoints,
        ranks,
        model_files,
    )

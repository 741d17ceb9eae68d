"""Finds the settings that make a trainer fit onto a smaller card: each is estimated alone, and the best three are named."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.check.memory.estimate import GIB, ModelShape, trainer_rank_parts
from services.common.config.training.adapter import AdapterConfig
from services.common.config.training.policy import PolicyConfig

MOST_NAMED = 3
_RANK = 16  # of the adapter that is proposed


def smaller_settings(where: str, shape: ModelShape, policy: PolicyConfig) -> str:
    """The three changes of one setting each that save most, with the GiB that are then needed; empty without any."""
    now = _total(shape, policy)
    found = sorted((_total(shape, changed), key) for key, changed in _changes(policy))
    named = [f"{where}.{key} ({total / GIB:.1f} GiB)" for total, key in found if total < now]
    return ", ".join(named[:MOST_NAMED])


def _total(shape: ModelShape, policy: PolicyConfig) -> float:
    return sum(trainer_rank_parts(shape, policy).values())


def _changes(policy: PolicyConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """Key and value as they are written, and the policy with it."""
    trainer = policy.trainer
    for offload in (["optimizer"], ["optimizer", "reference"], ["reference"]):
        allowed = policy.adapter is None and set(offload) > set(trainer.offload)
        if allowed and ("reference" not in offload or policy.algorithm.needs_reference):
            yield f"trainer.offload: [{', '.join(offload)}]", _with(policy, offload=offload)
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing: true", _with(policy, gradient_checkpointing=True)
    if trainer.compute_dtype == "float32":
        yield "trainer.compute_dtype: bfloat16", _with(policy, compute_dtype="bfloat16")
    budget, context = max(trainer.token_budget, policy.model.context_length), policy.model.context_length
    if budget > context:
        yield f"trainer.token_budget: {context}", _with(policy, token_budget=context)
    elif context > 1024:
        model = policy.model.model_copy(update={"context_length": context // 2})
        yield (
            f"model.context_length: {context // 2}",
            _with(policy, token_budget=context // 2).model_copy(update={"model": model}),
        )
    if policy.adapter is None:
        adapter = AdapterConfig(rank=_RANK, alpha=2 * _RANK)
        plain = _with(policy, offload=[name for name in trainer.offload if name != "optimizer"])
        yield f"adapter: {{rank: {_RANK}, alpha: {2 * _RANK}}}", plain.model_copy(update={"adapter": adapter})


def _with(policy: PolicyConfig, **changes: object) -> PolicyConfig:
    return policy.model_copy(update={"trainer": policy.trainer.model_copy(update=changes)})

"""The models below adapters: each is loaded once in a process, for all policies that have an adapter on it.

A base has the trainer's ``compute_dtype``, in which its digest is taken on both sides, and then the engine's. Nothing
writes into a base, so several engines may compute on one at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.config.training import PolicyConfig
from services.common.rpc.run_client import RunSettings
from services.common.weights.snapshot import AdapterIdentity, DigestAlgorithm, version_digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A loaded base and the digest of its weights in the trainer's type."""

    model: Any  # in the engine's type
    digest: str


class BaseModels:
    """The bases of one process. Policies are loaded one after another."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, ...], BaseModel] = {}

    def adapter(
        self, policy: str, settings: RunSettings, dtype: str
    ) -> tuple[Any, dict[str, torch.Tensor], AdapterIdentity]:
        """The base of a policy in the engine's ``dtype``, the tensors of its adapter's version 0, and their identity.

        Raises the errors of ``services.common.text.chat.load_model``, and ``ConfigError`` for a target that is no
        linear module of the model.
        """
        import torch

        from services.common.lora import identity_of, initial_adapter

        recipe = settings.recipe
        section = recipe.policies[policy]
        assert section.adapter is not None
        base = self._load(recipe.model_path(policy, settings.run_dir), section, dtype, recipe.digest_algorithm())
        identity = identity_of(base.model, section.adapter, base.digest)
        rounded: torch.dtype = getattr(torch, section.trainer.master_dtype)  # as the trainer's are
        tensors = initial_adapter(base.model, section.adapter, recipe.run.seed)
        return base.model, {name: tensor.to(rounded) for name, tensor in tensors.items()}, identity

    def _load(self, path: str, policy: PolicyConfig, dtype: str, algorithm: DigestAlgorithm) -> BaseModel:
        import torch

        from services.common.lora import tensor_entry
        from services.common.text.chat import load_model, named_weights

        key = (path, policy.trainer.compute_dtype, dtype, algorithm)
        if key not in self._loaded:
            model = load_model(path, policy.trainer.compute_dtype)
            entries = [tensor_entry(name, weight, algorithm) for name, weight in named_weights(model).items()]
            model.requires_grad_(False)
            kind: torch.dtype = getattr(torch, dtype)
            self._loaded[key] = BaseModel(model=model.to(kind), digest=version_digest(entries))
        return self._loaded[key]

"""LoRA adapters of torch models, with the names and formulas of PEFT (Hu et al. 2021, arXiv:2106.09685).

A target computes W x + (alpha / rank) B A x, with W frozen. A starts as in PEFT, uniform in +-1 / sqrt(inputs), and B at 0,
so that version 0 is the base. Initial values depend on the seed and the tensor's name only: every process of a run makes
the same ones. No dropout: the ratio of a policy to itself must be 1. Used by the trainer and the inference service.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from services.common.config.training import ALL_LINEAR, AdapterConfig
from services.common.errors import ConfigError, derived_seed
from services.common.weights.snapshot import (
    PEFT_PREFIX,
    A,
    AdapterIdentity,
    B,
    DigestAlgorithm,
    TensorEntry,
    tensor_digest,
)


class LoraLinear(torch.nn.Linear):
    """A linear module with an adapter. Its own weight and bias are the base's, under their old names, and frozen."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)  # takes the base's parameters instead of creating some
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        factory: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        with torch.random.fork_rng(devices=[]):  # ``initial_adapter`` has the values
            self.lora_A = torch.nn.Linear(base.in_features, rank, **factory)
            self.lora_B = torch.nn.Linear(rank, base.out_features, **factory)
        self.scale = scale
        self.enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]"""
        base = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return base
        low = F.linear(x, self.lora_A.weight.to(x.dtype))
        return base + self.scale * F.linear(low, self.lora_B.weight.to(x.dtype))


def target_modules(causal_lm: Any, config: AdapterConfig) -> dict[str, torch.nn.Linear]:
    """The linear modules that get an adapter, by name; the same ones once they have it.

    Raises:
        ConfigError: a target is no module of the model, is not linear, or is the head.
    """
    head = causal_lm.get_output_embeddings()
    modules = {name: module for name, module in causal_lm.named_modules() if name}
    linear = {
        name: module
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and module is not head and not _is_lora(f"{name}.weight")
    }
    if config.targets == ALL_LINEAR:
        return linear
    kinds = sorted({_last(name) for name in linear})
    for target in config.targets:
        if any(_last(name) == target for name in linear):
            continue
        there = any(_last(name) == target for name in modules)
        problem = "no linear module of it that an adapter can have" if there else "no module of it"
        raise ConfigError(
            f"adapter.targets names {target!r}, and {type(causal_lm).__name__} has {problem}: write some of "
            f"{', '.join(kinds)}, or all-linear"
        )
    return {name: module for name, module in linear.items() if _last(name) in config.targets}


def adapter_shapes(causal_lm: Any, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """The shapes of an adapter's tensors by their names in PEFT's files. Raises ``ConfigError`` for a wrong target."""
    shapes = {}
    for name, module in target_modules(causal_lm, config).items():
        shapes[f"{PEFT_PREFIX}{name}.{A}"] = (config.rank, module.in_features)
        shapes[f"{PEFT_PREFIX}{name}.{B}"] = (module.out_features, config.rank)
    return shapes


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The initial value of one tensor by its PEFT name, in float32 on the CPU."""
    if not name.endswith(A):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derived_seed(seed, "adapter", name))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def initial_adapter(causal_lm: Any, config: AdapterConfig, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of version 0, in float32 on the CPU. Raises ``ConfigError`` for a wrong target."""
    return {name: initial_tensor(name, shape, seed) for name, shape in adapter_shapes(causal_lm, config).items()}


def identity_of(causal_lm: Any, config: AdapterConfig, base: str) -> AdapterIdentity:
    """The identity of the adapter on a base with this digest. Raises ``ConfigError`` for a wrong target."""
    targets = sorted({_last(name) for name in target_modules(causal_lm, config)})
    return AdapterIdentity(rank=config.rank, alpha=config.alpha, targets=tuple(targets), base=base)


def attach(causal_lm: Any, config: AdapterConfig, dtype: torch.dtype) -> None:
    """Freeze the model and put an adapter in ``dtype`` on its targets, in place. The adapter's values are not set.

    Raises:
        ConfigError: a wrong target.
    """
    targets = target_modules(causal_lm, config)
    causal_lm.requires_grad_(False)
    for name, module in targets.items():
        owner, _, own_name = name.rpartition(".")
        setattr(
            causal_lm.get_submodule(owner), own_name, LoraLinear(module, config.rank, config.alpha / config.rank, dtype)
        )


def adapter_weights(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The tensors of an attached adapter by their names in PEFT's files."""
    return {f"{PEFT_PREFIX}{name}": tensor for name, tensor in _parameters(causal_lm) if _is_lora(name)}


def base_weights(causal_lm: Any) -> dict[str, torch.Tensor]:
    """The weights below an attached adapter, under the model's own names; tied weights once."""
    return {name: tensor for name, tensor in _parameters(causal_lm) if not _is_lora(name)}


def tensor_entry(name: str, tensor: torch.Tensor, algorithm: DigestAlgorithm) -> TensorEntry:
    """The record of a whole tensor for the digest of a base."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset=0,
        length=len(bits),
        digest=tensor_digest(bits, algorithm, num_threads=torch.get_num_threads()),
    )


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model computes as its base."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def _parameters(causal_lm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach()) for name, parameter in causal_lm.named_parameters(remove_duplicate=True))


def _is_lora(name: str) -> bool:
    return name.endswith((f".{A}", f".{B}"))


def _last(name: str) -> str:
    return name.rpartition(".")[2]

"""AdamW with a schedule and gradient clipping. One ``update`` is one optimizer step.

Independent of models and losses. Schedules are pure functions of the update number, so a resumed run needs only that
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog
import torch
from torch.distributed.tensor import DTensor

from services.common.config.training import OFFLOAD_BUCKET_BYTES, OptimizerConfig
from services.common.errors import ConfigError, in_buckets
from services.trainer.ranks import full

# --- Keeps AdamW's moments on the host between updates: each update moves them to the device and back, by buckets.


MOMENTS = ("exp_avg", "exp_avg_sq")
Parameter = torch.nn.Parameter


class MomentsOnHost:
    """Runs the updates of an AdamW and keeps its moments."""

    def __init__(self, adamw: torch.optim.AdamW, bucket_bytes: int = OFFLOAD_BUCKET_BYTES) -> None:
        self._adamw = adamw
        self._parameters: list[Parameter] = [p for group in adamw.param_groups for p in group["params"]]
        self._buckets = list(in_buckets(self._parameters, lambda p: _local(p.detach()).nbytes, bucket_bytes))
        for parameter in self._parameters:
            adamw.state[parameter] = initial_state(parameter, on_host=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, and clear the gradients."""
        gradients = {p: p.grad for p in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None  # the optimizer skips parameters without a gradient
        for bucket in self._buckets:
            host: dict[Parameter, dict[str, torch.Tensor]] = {}
            for parameter in bucket:
                parameter.grad = gradients.pop(parameter)
                state = self._adamw.state[parameter]
                host[parameter] = {name: state[name] for name in MOMENTS}
                state.update(
                    {name: _copied(moment, torch.empty_like(parameter)) for name, moment in host[parameter].items()}
                )
            self._adamw.step()
            for parameter in bucket:
                parameter.grad = None
                state = self._adamw.state[parameter]
                state.update({name: _copied(state[name], moment) for name, moment in host[parameter].items()})
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()  # a checkpoint may read them next


def initial_state(parameter: Parameter, *, on_host: bool) -> dict[str, torch.Tensor]:
    """AdamW's state before its first update, so that a checkpoint always has a place for it.

    Moments on the host are pinned for a GPU, so that copies run asynchronously.
    """
    where: dict[str, Any] = {"device": "cpu", "pin_memory": parameter.is_cuda} if on_host else {}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step} | {n: torch.empty_like(parameter, requires_grad=False, **where).zero_() for n in MOMENTS}


def _copied(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``target`` with the values of ``source``, copied in the order of the device's stream."""
    _local(target).copy_(_local(source), non_blocking=True)
    return target


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


log = structlog.get_logger(__name__)


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Learning rate of update number ``update``, from 0.

    >>> c = OptimizerConfig(lr=1.0, schedule="linear", total_updates=10, final_fraction=0.1)
    >>> [round(learning_rate(c, u), 3) for u in (0, 5, 10, 11)]
    [1.0, 0.55, 0.1, 0.1]
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.lr
    assert config.total_updates is not None, "the recipe fills it in"
    progress = min((update - config.warmup_updates) / (config.total_updates - config.warmup_updates), 1.0)
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_fraction + (1.0 - config.final_fraction) * left)


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one update."""

    grad_norm: float  # over all parameters and ranks, before clipping
    learning_rate: float
    applied: bool  # false when the gradient was not finite


class PolicyOptimizer:
    """AdamW over a model's parameters; sharded parameters keep sharded state, on the host with ``offload``.

    ``rates`` maps prefixes of parameter names to their own peak learning rates, on the same schedule.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        *,
        offload: bool = False,
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if config.schedule != "constant" and config.total_updates is None:
            raise ConfigError(f"optimizer.schedule: {config.schedule} needs total_updates (steps * minibatches)")
        self.config = config
        self.num_updates = 0  # includes skipped updates: the schedule follows the data
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.parameters = [p for _, p in named]
        apart = {id(p): rate for prefix, rate in rates.items() for name, p in named if name.startswith(prefix)}
        groups: list[dict[str, Any]] = []
        self._scales: list[float] = []  # per group: factor of the schedule's rate
        for rate in (None, *dict.fromkeys(apart.values())):
            own = [p for p in self.parameters if apart.get(id(p)) == rate]
            # Norm weights and biases are vectors.
            for chosen, decay in (
                ([p for p in own if p.ndim >= 2], config.weight_decay),
                ([p for p in own if p.ndim < 2], 0.0),
            ):
                if chosen:
                    groups.append({"params": chosen, "weight_decay": decay})
                    self._scales.append(1.0 if rate is None else rate / config.lr)
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self._step = MomentsOnHost(self.adamw).step if offload else self.adamw.step
        if not offload:
            self.adamw.state.update({p: initial_state(p, on_host=False) for p in self.parameters})

    def update(self) -> Update:
        """Clip, step, clear the gradients. A gradient that is not finite changes only the update number."""
        rate = learning_rate(self.config, self.num_updates)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        whole = full(torch.nn.utils.get_total_norm(gradients))
        if self.config.max_grad_norm is not None:
            # Scales by min(1, max / (norm + 1e-6)); the norm is whole, so every rank scales alike.
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, whole)
        norm = float(whole)
        applied = math.isfinite(norm)
        if applied:
            for group, scale in zip(self.adamw.param_groups, self._scales, strict=True):
                group["lr"] = rate * scale
            self._step()
        else:
            log.warning("optimizer.update_skipped", update=self.num_updates, grad_norm=norm)
        self.adamw.zero_grad(set_to_none=True)
        self.num_updates += 1
        return Update(grad_norm=norm, learning_rate=rate, applied=applied)

    def skip(self) -> None:
        """Count a minibatch without an update, and clear its gradients."""
        self.adamw.zero_grad(set_to_none=True)
        self.num_updates += 1

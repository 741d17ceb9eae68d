"""The ``optimizer`` section of a recipe: AdamW, its schedule, gradient clipping. Plain pydantic, no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ScheduleName = Literal["constant", "linear", "cosine"]


class OptimizerConfig(BaseModel):
    """How gradients become updates.

    >>> OptimizerConfig(lr=1e-3, schedule="linear", total_updates=60, final_fraction=0.1).betas
    (0.9, 0.95)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay; never applied to norms and biases."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm; null only measures the norm."""

    schedule: ScheduleName = "constant"
    """After the warm-up: constant, or down to final_fraction * lr at total_updates, in a line or half a cosine."""

    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises in a line from lr / (warmup_updates + 1)."""

    total_updates: int | None = Field(default=None, gt=0)
    """Number of optimizer updates that the schedule spans; left out, the whole run (steps * minibatches)."""

    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of lr left at total_updates and afterwards."""

    @model_validator(mode="after")
    def _check_combination(self) -> OptimizerConfig:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {list(self.betas)}")
        if self.total_updates is not None and self.total_updates <= self.warmup_updates:
            raise ValueError(
                f"total_updates ({self.total_updates}) must be more than warmup_updates ({self.warmup_updates})"
            )
        return self

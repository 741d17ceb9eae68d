"""The ``adapter`` section of a policy: LoRA. Plain pydantic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from services.common.config.base import Section

ALL_LINEAR: Literal["all-linear"] = "all-linear"


class AdapterConfig(Section):
    """A low-rank adapter on a frozen model (LoRA, Hu et al. 2021, arXiv:2106.09685): W x + alpha / rank * B A x."""

    rank: int = Field(ge=1)
    """Rows of A and columns of B, in each target."""
    alpha: float = Field(gt=0)
    """The adapter's product is multiplied by `alpha / rank`."""
    targets: list[str] | Literal["all-linear"] = ALL_LINEAR
    """The linear modules that get an adapter, by the last part of their names, such as `[q_proj, v_proj]`; `all-linear` is
    every linear module but the head."""

    @field_validator("targets")
    @classmethod
    def _are_names(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError("targets is empty: name modules, such as q_proj, or write all-linear")
        if wrong := sorted({name for name in value if not name or value.count(name) > 1}):
            raise ValueError(f"targets has {wrong[0]!r} more than once, or empty: name each module once")
        return value


def with_adapter_transfer(written: Any) -> Any:
    """The policy's section as written, with ``weights.transfer: full`` if it has an adapter.

    Every element of an adapter moves in every update, so a delta is no smaller than the adapter and costs its coding.
    Raises ``ValueError`` for settings of deltas.
    """
    if not isinstance(written, dict) or written.get("adapter") is None:
        return written
    weights = written.get("weights", {})
    if not isinstance(weights, dict):
        return written
    if weights.get("transfer", "auto") not in ("auto", "full"):
        raise ValueError(
            f"weights.transfer is {weights['transfer']}, and adapter is set: every element of an adapter moves in every "
            "update, so that a delta saves nothing: write transfer: full, or leave it out"
        )
    if weights.get("full_every"):
        raise ValueError(
            f"weights.full_every is {weights['full_every']}, and adapter is set: each version of an adapter is sent in "
            "full: leave full_every out"
        )
    return {**written, "weights": {**weights, "transfer": "full"}}


def check_adapter(*, trained: bool, offload: Sequence[str], has_teacher: bool) -> None:
    """Raise ``ValueError`` where other settings of a policy with an adapter make no sense."""
    if not trained:
        raise ValueError("adapter is set, and trained is false: there is no adapter to train; leave adapter out")
    if "optimizer" in offload:
        raise ValueError(
            "trainer.offload has optimizer, and adapter is set: the base has no moments, and those of an adapter are "
            "small; leave optimizer out"
        )
    if "reference" in offload and not has_teacher:
        raise ValueError(
            "trainer.offload has reference, and adapter is set: the reference is the model without its adapter, without "
            "weights of its own; leave reference out"
        )

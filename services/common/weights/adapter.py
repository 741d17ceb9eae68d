"""The identity of a LoRA adapter: its sizes, its targets and the weights below it.

A version of an adapter holds only the adapter's tensors. Two versions with equal tensors are different policies on
different bases, so the identity is part of the version's digest, of a manifest and of a checkpoint. Independent of
torch and gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import ModelMismatchError

PEFT_PREFIX = "base_model.model."  # of the names in PEFT's files
A, B = "lora_A.weight", "lora_B.weight"  # under the name of a target


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterIdentity:
    """The facts about an adapter that its tensors do not state.

    >>> held = AdapterIdentity(rank=8, alpha=16.0, targets=("q_proj",), base="xxh3-128:00")
    >>> held.scale, AdapterIdentity.from_json(held.to_json()) == held
    (2.0, True)
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last parts of module names, sorted
    base: str  # digest of the weights below, as of a version that holds them

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    @property
    def digest_text(self) -> str:
        """The text that a version's digest covers."""
        return f"lora\0{self.rank}\0{self.alpha!r}\0{','.join(self.targets)}\0{self.base}\0"

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets), "base": self.base}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterIdentity:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` when the data is no identity."""
        targets = data["targets"]
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise ValueError(f"targets of an adapter are names, got {targets!r}")
        return cls(
            rank=int(data["rank"]), alpha=float(data["alpha"]), targets=tuple(targets), base=str(data["base"])
        )  # fmt: skip


def check_same_adapter(own: AdapterIdentity | None, other: AdapterIdentity | None, where: str) -> None:
    """Raise ``ModelMismatchError``, naming each difference, unless ``where`` holds the adapter that is expected here."""
    if own == other:
        return
    if own is None or other is None:
        words = {True: "all weights of a model", False: "an adapter"}
        raise ModelMismatchError(f"{where} holds {words[other is None]}, expected {words[own is None]}")
    differences = [
        f"{name} {there}, expected {here}"
        for name, here, there in (
            ("base", own.base, other.base),
            ("rank", own.rank, other.rank),
            ("alpha", f"{own.alpha:g}", f"{other.alpha:g}"),
            ("targets", ", ".join(own.targets), ", ".join(other.targets)),
        )
        if here != there
    ]
    raise ModelMismatchError(f"{where} holds another adapter: {'; '.join(differences)}")

"""What ``Engine.update`` is given: whole tensors, or only the elements of them that changed.

Numpy arrays and torch tensors go through untouched; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.weights.codec import ChunkChange


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """From one version to another. Tensors go by their Hugging Face names, tied weights once.

    ``complete`` says that ``whole`` names every tensor of the model; otherwise what is not named stays as it is.
    """

    version: int
    whole: Mapping[str, Any] = field(default_factory=dict)  # host tensors, in any floating type
    changes: Mapping[str, Sequence[ChunkChange]] = field(default_factory=dict)  # bits of the type ``dtype``
    dtype: str = ""  # of the changes, as torch names it
    complete: bool = True

    @classmethod
    def full(cls, weights: Mapping[str, Any], version: int) -> WeightUpdate:
        """Every tensor, whole."""
        return cls(version=version, whole=weights)

    @property
    def num_changes(self) -> int:
        """Elements changed in place."""
        return sum(change.num_changes for changes in self.changes.values() for change in changes)

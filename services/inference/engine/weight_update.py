"""The argument of ``Engine.update``: whole tensors, or only their changed elements; with a check against a model's shapes.

Numpy arrays and torch tensors pass unchanged; this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import ModelMismatchError
from services.common.text.huggingface import check_weights_match
from services.common.weights.codec import ChunkChange


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The change from one version to another. Tensors have their Hugging Face names; tied weights appear once.

    ``complete``: ``whole`` names every tensor of the model. Otherwise tensors that are not named keep their values.
    """

    version: int
    whole: Mapping[str, Any] = field(default_factory=dict)  # host tensors, in any floating type
    changes: Mapping[str, Sequence[ChunkChange]] = field(default_factory=dict)  # bits of the type ``dtype``
    dtype: str = ""  # of the changes, in torch's notation
    complete: bool = True

    @classmethod
    def full(cls, weights: Mapping[str, Any], version: int) -> WeightUpdate:
        """Every tensor, whole."""
        return cls(version=version, whole=weights)

    @property
    def num_changes(self) -> int:
        """Elements changed in place."""
        return sum(change.num_changes for changes in self.changes.values() for change in changes)


def check_update(update: WeightUpdate, weights: Mapping[str, Any]) -> None:
    """``weights`` has the model's shapes by name. ``ModelMismatchError`` when the update is for another model."""
    if update.complete:
        check_weights_match(weights, update.whole)
        return
    unknown = [name for name in (*update.whole, *update.changes) if name not in weights]
    if unknown:
        raise ModelMismatchError(f"weights of the update do not match the model: unexpected: {', '.join(unknown[:4])}")
    check_weights_match({name: weights[name] for name in update.whole}, update.whole)
    for name, changes in update.changes.items():
        size = math.prod(weights[name].shape)
        for change in changes:
            last = len(change.values) if change.positions is None else int(change.positions[-1]) + 1
            if change.start + last > size:
                raise ModelMismatchError(
                    f"weights of the update do not match the model: {name} has {size} elements, "
                    f"the update changes element {change.start + last - 1}"
                )

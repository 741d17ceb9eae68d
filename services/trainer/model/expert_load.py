"""Says which stored tensors make up a merged weight of experts, for loading a mixture of experts expert by expert.

Checkpoints store the matrices of each expert, transformers computes with one tensor of all experts:

    experts.E.gate_proj, experts.E.up_proj  [wide, hidden]   ->   experts.gate_up_proj[E]  [2 wide, hidden]
    experts.E.down_proj                     [hidden, wide]   ->   experts.down_proj[E]     [hidden, wide]

A rank holds some experts whole (sharding cuts along the first dimension), so it reads their matrices and no others. Which
names belong together is transformers' own table; conversions of any other kind are left to loading the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Sources = tuple[str, ...]  # stored matrices of one expert, in the order of their rows

# By name, in order: stack the experts; stack them, then put matrices below each other within each expert.
_SUPPORTED: tuple[tuple[tuple[str, int], ...], ...] = (
    (("MergeModulelist", 0),),
    (("MergeModulelist", 0), ("Concatenate", 1)),
)


def merged_experts(
    model_type: str, shapes: Mapping[str, Sequence[int]], stored: Collection[str]
) -> dict[str, list[Sources]]:
    """The stored matrices of every expert, by the weight that merges them; weights that are stored as they are left out.

    ``shapes`` are those of the model's weights by name, ``stored`` the names in the checkpoint.
    """
    found: dict[str, list[Sources]] = {}
    for patterns, target in _mergers(model_type):
        for name in shapes:
            if name in stored or not name.endswith(target):
                continue
            prefix = name.removesuffix(target)
            experts = [
                tuple(prefix + pattern.replace("*", str(expert)) for pattern in patterns)
                for expert in range(shapes[name][0])
            ]
            if all(source in stored for sources in experts for source in sources):
                found[name] = experts
    return found


def _mergers(model_type: str) -> list[tuple[list[str], str]]:
    """(patterns of stored names, ending of the merged name) of the supported conversions of a kind of model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = []
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        operations: Any = getattr(conversion, "operations", None) or ()
        kinds = tuple(
            (type(operation).__name__, operation.dim) for operation in operations if hasattr(operation, "dim")
        )
        patterns, targets = conversion.source_patterns, conversion.target_patterns
        plain = all(pattern.count("*") == 1 for pattern in patterns) and len(targets) == 1
        if plain and len(kinds) == len(operations) and kinds in _SUPPORTED:
            found.append((list(patterns), str(targets[0])))
    return found

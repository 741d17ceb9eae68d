"""Selects this replica's section of the recipe. ``services.common.config`` defines the sections."""

from __future__ import annotations

from typing import Any

from services.common.config.processes import InferenceConfig
from services.common.config.recipe import Recipe


def replica_config(
    recipe: Recipe, name: str, port: int | None = None, num_slots: int | None = None, host: str | None = None
) -> InferenceConfig:
    """The section ``inference.<name>`` with the command line's changes.

    A name that the recipe lacks takes the first section's settings on a free port, so that further replicas can join.
    """
    known = name in recipe.inference
    config = recipe.inference[name] if known else next(iter(recipe.inference.values()))
    changes: dict[str, Any] = {} if known else {"port": 0}
    if not known and config.endpoint.port is not None:
        changes["endpoint"] = config.endpoint.model_copy(update={"port": 0})
    if port is not None:
        changes["port"] = port
    if host is not None:
        changes["host"] = host
    if num_slots is not None:
        changes["num_slots"] = num_slots
    return config.model_copy(update=changes)

"""The key ``defaults`` of a recipe: settings of all its policies and of all its inference services, written once.

    defaults:
      policies: {batch: {size: 256}}      # every policy without its own value under policies.<name>
      inference: {engine: sglang}         # every service without its own value under inference.<name>

They are merged under each entry before the recipe is validated; the resolved recipe holds them spread out.

Workflows that datasets have of their own are completed in the same way: their settings over those of the run's workflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import ConfigError
from services.common.records.dataset_rows import BuiltInWorkflow

SECTIONS = ("policies", "inference")


def spread_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without ``defaults``, its settings under each entry. Raises ``ConfigError`` for another section."""
    result = dict(tree)
    defaults = result.pop("defaults", None) or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError(f"defaults: write {' and '.join(SECTIONS)} below it")
    for section, settings in defaults.items():
        if section not in SECTIONS:
            raise ConfigError(f"defaults.{section}: unknown key; write one of {', '.join(SECTIONS)}")
        entries = result.get(section)
        if isinstance(entries, Mapping) and isinstance(settings, Mapping):
            result[section] = {
                name: merge(settings, entry if entry is not None else {}) for name, entry in entries.items()
            }
    return result


def merge(base: Mapping[str, Any], top: Any) -> Any:
    """``top`` over ``base``: mappings key by key, everything else replaced."""
    if not isinstance(top, Mapping):
        return top
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) else value
    return merged


def with_own_workflows(tree: Any) -> Any:
    """The tree of a recipe in which each ``data.….workflow`` is whole.

    One without a name, or with the name of the run's workflow, has the settings of that workflow below its own. Under
    ``data.evaluation`` the run's workflow is ``evaluation.workflow`` where there is one. Completing it twice changes nothing.
    """
    data = tree.get("data") if isinstance(tree, Mapping) else None
    if not isinstance(data, Mapping):
        return tree
    whole = dict(data)
    training = tree.get("workflow") or {}
    train = data.get("train")
    if isinstance(train, list):
        whole["train"] = [_completed(section, training) for section in train]
    else:
        whole["train"] = _completed(train, training)
    sections = data.get("evaluation")
    if isinstance(sections, Mapping):
        evaluation = tree.get("evaluation")
        own = evaluation.get("workflow") if isinstance(evaluation, Mapping) else None
        whole["evaluation"] = {name: _completed(section, own or training) for name, section in sections.items()}
    return {**tree, "data": {key: value for key, value in whole.items() if key in data}}


def _completed(section: Any, base: Any) -> Any:
    own = section.get("workflow") if isinstance(section, Mapping) else None
    if not isinstance(own, Mapping) or not isinstance(base, Mapping):
        return section
    if "name" in own and own["name"] != base.get("name", BuiltInWorkflow.SINGLE_TURN):
        return section
    return {**section, "workflow": merge(base, own)}

"""Completes the workflows that datasets have of their own: settings over those of the run's workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config.reading.defaults import merge


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
    if "name" in own and own["name"] != base.get("name", "single_turn"):
        return section
    return {**section, "workflow": merge(base, own)}

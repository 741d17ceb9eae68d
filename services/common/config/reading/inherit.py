"""``extends``: finds the recipe that another one names, and merges the two.

Mappings are merged key by key; lists and scalars replace. A section that names another thing than the parent's begins
anew, because the parent's settings have no meaning for the new thing: ``workflow`` with another ``name`` (the same under
``evaluation``), and a dataset with another kind of source (``path``, ``name``, ``generator``, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.config.data import SOURCES
from services.common.config.reading.defaults import merge
from services.common.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[4] / "recipes"  # those that come with Rollmill
# Settings of a dataset that belong to its source; the others (limit, samples_per_task, ...) are kept.
_OF_SOURCE = (*SOURCES, "size", "settings", "subset", "split", "form", "id_field", "columns")


def parent_of(file: Path, extends: object) -> Path:
    """The file that ``extends`` in ``file`` means: a path relative to the file, or the name of a recipe that comes with
    Rollmill, such as ``base`` or ``quickstart``.

    Raises:
        ConfigError: it is neither; with the names that there are.
    """
    if not isinstance(extends, str):
        raise ConfigError(f"{file}: extends must be one path or name, not {extends!r}")
    beside = file.parent / extends  # an absolute path replaces the folder
    for place in (beside, beside / "recipe.yaml"):
        if place.is_file():
            return place
    if is_name(extends):
        if (shipped := shipped_recipe(extends)) is not None:
            return shipped
        if Path(f"{beside}.yaml").is_file():
            raise ConfigError(f"{file}: extends names {extends!r}; for the file beside it write {extends}.yaml")
        raise ConfigError(
            f"{file}: extends names {extends!r}, which is neither a file beside it nor a recipe that comes with Rollmill: "
            f"write a path, or one of {', '.join(names())}"
        )
    raise ConfigError(
        f"{file}: extends names {beside}, which does not exist: write a path relative to {file.parent}, or the name of a "
        f"recipe that comes with Rollmill, such as base"
    )


def is_name(text: str) -> bool:
    """Whether ``text`` can name a recipe that comes with Rollmill, because it is no path."""
    return not text.endswith((".yaml", ".yml")) and "/" not in text


def shipped_recipe(name: str) -> Path | None:
    """The file of the recipe ``name`` that comes with Rollmill, such as ``quickstart`` or ``one-card/qwen3-0.6b-full``; None if
    there is none."""
    places = (RECIPES / f"{name}.yaml", RECIPES / name / "recipe.yaml")
    return next((place for place in places if place.is_file() and place.resolve().is_relative_to(RECIPES)), None)


def names() -> list[str]:
    """Names of the recipes that come with Rollmill, those that only others extend included."""
    return sorted([file.stem for file in RECIPES.glob("*.yaml")] + whole_names())


def whole_names() -> list[str]:
    """Names of the recipes that come with Rollmill and can run."""
    return sorted(file.parent.name for file in RECIPES.glob("*/recipe.yaml"))


def inherit(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """``child`` over ``parent``.

    >>> inherit({"workflow": {"name": "tool_use", "settings": {"max_turns": 3}}}, {"workflow": {"name": "single_turn"}})
    {'workflow': {'name': 'single_turn'}}
    """
    result = dict(parent)
    _begin_workflow_anew(result, child)
    result["evaluation"] = evaluation = dict(_mapping(result, "evaluation"))
    _begin_workflow_anew(evaluation, _mapping(child, "evaluation"))
    _begin_datasets_anew(result, _mapping(child, "data"))
    merged: dict[str, Any] = merge({key: value for key, value in result.items() if key in parent}, child)
    return merged


def _begin_workflow_anew(parent: dict[str, Any], child: Mapping[str, Any]) -> None:
    """Drop the parent's workflow where both name one, and not the same; settings without a name are for the child's."""
    name, inherited = _mapping(child, "workflow").get("name"), _mapping(parent, "workflow").get("name")
    if name is not None and inherited is not None and inherited != name:
        parent.pop("workflow", None)


def _begin_datasets_anew(parent: dict[str, Any], child: Mapping[str, Any]) -> None:
    """Drop the source of each of the parent's datasets where the child names one of another kind."""
    data = dict(_mapping(parent, "data"))
    if not data:
        return
    if isinstance(data.get("train"), Mapping):  # a list of sources is replaced as a whole
        data["train"] = _without_source(data["train"], _mapping(child, "train"))
    new = _mapping(child, "evaluation")
    data["evaluation"] = {
        name: _without_source(section, _mapping(new, name)) if isinstance(section, Mapping) else section
        for name, section in _mapping(data, "evaluation").items()
    }
    parent["data"] = {key: value for key, value in data.items() if key in _mapping(parent, "data")}


def _without_source(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    named = [key for key in SOURCES if child.get(key) is not None]
    if not named or any(parent.get(key) is not None for key in named):
        return dict(parent)
    return {key: value for key, value in parent.items() if key not in _OF_SOURCE}


def _mapping(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}

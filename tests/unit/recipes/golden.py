"""Golden files: every setting that a recipe and its bases make, one per line, resolved, with its type.

A setting that a golden file does not name must be at its schema default, and ``defaults.json`` holds those. So a new
key with a default changes no golden file, and no default changes unseen. After a change that is meant:

    python -m tests.unit.recipes.golden

rewrites the files; read the diff against the reference before the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.inference.workflows.registry import load_workflow

REPOSITORY = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).parent / "golden"
DEFAULTS = GOLDEN / "defaults.json"
FAMILIES = ("math-multi-agent", "code", "code-multi-agent", "alfworld", "webshop", "rstar2")

Flat = dict[str, Any]


def recipes() -> list[str]:
    """``family/name`` of every production recipe."""
    files = [file for family in FAMILIES for file in (REPOSITORY / "recipes" / family).glob("*/recipe.yaml")]
    return sorted(str(file.parent.relative_to(REPOSITORY / "recipes")) for file in files)


@cache
def load(name: str) -> Recipe:
    return load_recipe(REPOSITORY / "recipes" / name, (), {})


def golden_file(name: str) -> Path:
    return GOLDEN / f"{name.replace('/', '--')}.json"


def resolved(recipe: Recipe) -> Flat:
    """Path -> value; the settings of workflows as their own schema resolves them."""
    tree = recipe.model_dump(mode="json")
    for section in (tree["workflow"], tree["evaluation"]["workflow"]):
        if section is not None:
            settings = load_workflow(section["name"]).Settings.model_validate(section["settings"])
            section["settings"] = settings.model_dump(mode="json")
    return dict(flat(tree))


def defaults_of(recipe: Recipe) -> Flat:
    """The same of a recipe with the same policies, services and datasets, but without settings of these."""
    bare: dict[str, Any] = {
        "name": "",
        "policies": {name: {"model": {"path": ""}, "trainer": {"port": 0}, "weights": {"port": 0}} for name in recipe.policies},
        "inference": {name: {"port": 0} for name in recipe.inference},
        "workflow": {"name": recipe.workflow.name},
        "data": {"train": {"name": ""}, "evaluation": {name: {"name": ""} for name in recipe.data.evaluation}},
    }  # fmt: skip
    bare["evaluation"] = {"samplings": {name: {} for name in recipe.evaluation.samplings}}
    if recipe.evaluation.workflow is not None:
        bare["evaluation"]["workflow"] = {"name": recipe.evaluation.workflow.name}
    return resolved(Recipe.model_validate(bare))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def golden_of(recipe: Recipe) -> Flat:
    """The content of a golden file: the written settings of a recipe, resolved, with all optional sections that the
    recipe has."""
    written = dict(flat(recipe.model_dump(mode="json", exclude_unset=True)))
    defaults = defaults_of(recipe)
    return {path: value for path, value in resolved(recipe).items() if path in written or path not in defaults}


def same(settings: Flat, path: str, value: Any) -> bool:
    """Equal and of one type: 1 is neither 1.0 nor true."""
    return path in settings and json.dumps(settings[path]) == json.dumps(value)


def read(file: Path) -> Flat:
    loaded: Flat = json.loads(file.read_text())
    return loaded


def write(file: Path, settings: Flat) -> None:
    lines = [f" {json.dumps(path)}: {json.dumps(value, ensure_ascii=False)}" for path, value in settings.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    for old in GOLDEN.glob("*.json"):
        old.unlink()
    defaults: Flat = {}
    for name in recipes():
        recipe = load(name)
        write(golden_file(name), golden_of(recipe))
        defaults |= schema_defaults(recipe)
    write(DEFAULTS, dict(sorted(defaults.items())))


def schema_defaults(recipe: Recipe) -> Flat:
    """The defaults of a recipe; those of workflows under their names, without their prompts."""
    named: Flat = {}
    for path, value in defaults_of(recipe).items():
        is_setting = "workflow.settings." in path
        if is_setting and (path.startswith("evaluation.") or (isinstance(value, str) and len(value) > 40)):
            continue  # prompts have tests of their own
        named[path.replace("workflow.settings", recipe.workflow.name)] = value
    return {path: value for path, value in named.items() if path not in ("name", "workflow.name")}


if __name__ == "__main__":
    main()

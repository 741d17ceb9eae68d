"""``defaults``: settings of all policies and services, written once, below the settings of an entry itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config.loading import load_recipe
from services.common.errors import ConfigError

TREE: dict[str, Any] = {
    "name": "child",
    "defaults": {
        "policies": {"model": {"path": "some/model"}, "batch": {"size": 64, "minibatches": 4}},
        "inference": {"num_slots": 7},
    },
    "policies": {
        "model0": None,
        "model1": {"batch": {"size": 32}, "trainer": {"port": 1}, "weights": {"port": 2}},
    },
    "inference": {"a": None, "b": {"port": 3, "num_slots": 9}},
    "data": {"train": {"path": "tasks.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
}


def written(directory: Path, tree: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = directory / name
    path.write_text(yaml.safe_dump(tree))
    return path


def test_they_stand_below_each_entry(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, TREE), (), {})
    assert [(p.batch.size, p.batch.minibatches) for p in recipe.policies.values()] == [(64, 4), (32, 4)]
    assert [service.num_slots for service in recipe.inference.values()] == [7, 9]


def test_they_are_inherited_and_overridden_like_any_setting(tmp_path: Path) -> None:
    written(tmp_path, TREE, "base.yaml")
    child = written(tmp_path, {"extends": "base.yaml", "defaults": {"policies": {"batch": {"size": 128}}}})
    recipe = load_recipe(child, ["defaults.policies.batch.minibatches=8", "policies.model0.batch.max_staleness=5"], {})
    assert [(p.batch.size, p.batch.minibatches) for p in recipe.policies.values()] == [(128, 8), (32, 8)]
    assert [p.batch.max_staleness for p in recipe.policies.values()] == [5, 2]


def test_another_section_and_an_unknown_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"defaults\.data: unknown key; write one of policies, inference"):
        load_recipe(written(tmp_path, TREE | {"defaults": {"data": {}}}), (), {})
    with pytest.raises(ConfigError, match=r"policies\.model0\.batch\.sise: unknown key; did you mean 'size'"):
        load_recipe(written(tmp_path, TREE), ["defaults.policies.batch.sise=1"], {})


def test_with_sglang_the_launcher_waits_until_models_are_loaded() -> None:
    plain = load_recipe(Path("recipes/quickstart"), ["launch.ready_timeout_s=10"], {})
    loading = load_recipe(
        Path("recipes/quickstart"),
        ["launch.ready_timeout_s=10", "inference.a.engine=sglang"],
        {},
    )
    assert (plain.ready_timeout_s, loading.ready_timeout_s) == (10.0, 610.0)

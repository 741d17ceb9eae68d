"""Models that a recipe builds: made once into the run directory, different ones for different policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.trainer.build_models import build_models
from tests.unit.trainer_service.building import recipe

BUILDER = "services.common.tiny_models:build"


def built(**model: Any) -> Recipe:
    tree = recipe(Path("nowhere")).model_dump(mode="json")
    section = tree["policies"]["model0"]
    section["model"] = {"builder": BUILDER, "context_length": 64} | model
    tree["policies"]["model1"] = {**section, "trainer": {"port": 0}}
    return validate(tree, source="test")


def test_each_policy_gets_a_model_of_its_own_where_the_recipe_looks_for_it(tmp_path: Path) -> None:
    plan = built()
    made = build_models(plan, tmp_path)
    assert [str(path) for path in made] == [plan.model_path(name, tmp_path) for name in ("model0", "model1")]
    first, second = ((path / "model.safetensors").read_bytes() for path in made)
    assert first != second


def test_they_are_made_once_and_not_by_other_settings(tmp_path: Path) -> None:
    (made, _) = build_models(built(), tmp_path)
    changed = (made / "model.safetensors").stat().st_mtime_ns
    build_models(built(), tmp_path)
    assert (made / "model.safetensors").stat().st_mtime_ns == changed
    with pytest.raises(ConfigError, match="made by other model settings"):
        build_models(built(builder_settings={"kind": "qwen2"}), tmp_path)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"builder_settings": {"colour": "red"}}, "colour"),
        ({"builder": "services.common.tiny_models:nothing"}, "nothing"),
    ],
)
def test_builders_that_cannot_work_are_told(tmp_path: Path, model: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_models(built(**model), tmp_path)
    assert not (tmp_path / "models" / "model0").exists()


def test_a_model_is_loaded_or_built_not_both() -> None:
    with pytest.raises(ConfigError, match="`path` or `builder`, not both"):
        built(path="somewhere")

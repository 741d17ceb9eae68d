"""The recipes for one 24 GB card: they fit, only because both halves take turns, and a smaller card is told what helps."""

from __future__ import annotations

import pytest

from services.cli.check.memory import GIB, alone, estimates, misfits
from services.common.config.loading import load_recipe
from services.common.config.processes import Placement
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from tests.unit.recipes.golden import REPOSITORY

RECIPES = ("qwen3-0.6b-full", "qwen3-1.7b-lora")


def load(name: str, *settings: str) -> Recipe:
    return load_recipe(REPOSITORY / "recipes" / "one-card" / name, settings, {})


@pytest.mark.parametrize("name", RECIPES)
def test_a_card_of_24_gb_has_room_for_each_turn_and_not_for_both_halves(name: str) -> None:
    recipe = load(name)
    assert recipe.placement is Placement.SHARED and recipe.launch.gpu_memory_gib < 24
    found = estimates(recipe)
    assert {estimate.process for estimate in found} == {"trainer-model0", "inference-a"}
    assert all(estimate.fits and estimate.gpus == (0,) for estimate in found)
    assert not misfits(recipe)
    assert sum(estimate.total for estimate in alone(recipe)) > recipe.launch.gpu_memory_gib * GIB


def test_a_card_too_small_is_told_with_the_figure_and_three_settings() -> None:
    recipe = load(RECIPES[0], "launch.gpu_memory_gib=10", "inference.a.num_slots=8")
    (line,) = misfits(recipe)
    assert "trainer-model0 needs 1" in line and "launch.gpu_memory_gib: 10" in line
    settings = line.partition("write policies.")[2]
    assert settings.count("GiB)") == 3
    needed = [float(part.rpartition("(")[2]) for part in settings.split(" GiB)")[:3]]
    assert needed == sorted(needed), "the one that helps most comes first"
    assert "policies.model0.adapter: {rank: 16" in line and "trainer.offload: [optimizer, reference]" in line


def test_settings_that_are_named_help_as_much_as_is_said() -> None:
    recipe = load(RECIPES[0], "launch.gpu_memory_gib=10", "inference.a.num_slots=8")
    (line,) = misfits(recipe)
    said = float(line.partition("trainer.offload: [optimizer, reference] (")[2].partition(" GiB")[0])
    changed = load(RECIPES[0], "policies.model0.trainer.offload=[optimizer, reference]")
    trainer, *_ = estimates(changed)
    assert trainer.process == "trainer-model0" and trainer.total / GIB == pytest.approx(said, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["placement=apart"], ("both take GPU 0", "placement: shared")),
        (["inference.a.engine=sglang"], ("inference.a.engine is sglang", "does not free its memory", "torch")),
        (["inference.a.node=1"], ("inference.a.node is 1", "placement: apart")),
        (["placement=turns"], ("placement", "'apart' or 'shared'")),
        (["policies.model0.trainer.device=cpu"], ("policies.model0.trainer.gpus", "device is cpu")),
    ],
)
def test_what_cannot_take_turns_is_refused_with_what_to_write(settings: list[str], told: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RECIPES[0], *settings)
    assert all(part in caught.value.message for part in told), caught.value.message

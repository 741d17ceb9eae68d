"""``run.until`` is refused if no evaluation of the run could ever be compared with the threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}}


def recipe(until: dict[str, Any] | None, policies: tuple[str, ...] = ("a",), **sections: Any) -> Recipe:
    evaluation = {"every": 2, "samplings": SAMPLINGS, **sections.pop("evaluation", {})}
    tree = {
        "name": "until",
        "run": {"steps": 8, "until": until},
        "policies": {
            name: {"model": {"path": "none"}, "trainer": {"port": 0}, "weights": {"port": 0}} for name in policies
        },
        "data": {"train": {"path": "x"}, "evaluation": {"held_out": {"path": "x"}, "other": {"path": "x"}}},
        "evaluation": evaluation,
        **sections,
    }
    return validate(tree, source="test")


def until(**settings: Any) -> dict[str, Any]:
    return {"evaluation": "sampled", "at_least": 0.9, **settings}


def test_a_threshold_of_a_sampling_of_the_recipe_is_taken() -> None:
    found = recipe(until()).run.until
    assert found is not None
    assert (found.threshold(), found.metric, found.in_a_row) == (0.9, "reward", 2)


def test_rewards_may_be_negative_or_above_one() -> None:
    for number in (-3.0, 40.0):
        found = recipe(until(at_least=number)).run.until
        assert found is not None and found.threshold() == number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_threshold_that_is_no_finite_number_is_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        recipe(until(at_least=number))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"evaluation": "samplde"}, "'samplde'.*greedy.*sampled"),
        ({"dataset": "heldout"}, "'heldout'.*held_out.*other"),
        ({"metric": "accuracy"}, "'accuracy'"),
        ({"metric": "pass@0"}, "'pass@0'"),
        ({"metric": "pass@2"}, "1 samples of a task"),
        ({"in_a_row": 0}, "in_a_row"),
        ({"at_least": {}}, "names no policy"),
        ({"at_least": {"a": 0.5}}, "play together"),
        ({"att_least": 0.5}, "att_least"),
    ],
)
def test_what_the_recipe_does_not_have_is_refused_with_what_it_has(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe(until(**settings))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_of_passes_lies_between_0_and_1(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        recipe(until(metric="pass@1", at_least=share))


def test_pass_at_k_needs_a_power_of_two_up_to_the_samples() -> None:
    four: dict[str, Any] = {"evaluation": {"samples_per_task": 4}}
    assert recipe(until(metric="pass@4"), **four).run.until is not None
    with pytest.raises(ConfigError, match="power"):
        recipe(until(metric="pass@3"), **four)


def test_an_evaluation_that_is_never_scheduled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.every is 0"):
        recipe(until(), evaluation={"every": 0})
    with pytest.raises(ConfigError, match="during_samplings"):
        recipe(until(), evaluation={"during_samplings": ["greedy"]})
    with pytest.raises(ConfigError, match="during_samplings"):
        recipe(None, evaluation={"during_samplings": ["samplde"]})


def test_policies_that_play_apart_may_each_have_their_own() -> None:
    apart: dict[str, Any] = {"policies": ("a", "b"), "rollout": {"policies": "apart"}}
    found = recipe(until(at_least={"a": 0.9, "b": 0.5}), **apart).run.until
    assert found is not None
    assert [found.threshold(policy) for policy in ("a", "b")] == [0.9, 0.5]
    for wrong in ({"a": 0.9}, {"a": 0.9, "c": 0.5}, {"a": 0.9, "b": math.nan}):
        with pytest.raises(ConfigError, match="at_least"):
            recipe(until(at_least=wrong), **apart)

"""The curriculum, and prompt curation: skipped prompts, the reasons, and the dependence on the seed alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.config.data import DataConfig
from services.orchestrator.tasks.orders import Curriculum, FilterSolved, Greso, PassRate


def test_a_prompt_is_filtered_once_its_average_reaches_the_limit_and_comes_back_when_it_falls() -> None:
    curation = FilterSolved(1)
    for _ in range(29):
        assert curation.accepts(7, 0)
        curation.observe(7, [1.0] * 4)
    curation.observe(7, [])  # every rollout failed: nothing is known of the prompt
    assert not curation.accepts(7, 1) and curation.accepts(8, 2)
    curation.observe(7, [0.0] * 4)
    assert curation.accepts(7, 3)
    assert curation.gauges()["curation_skipped"] == 1


def groups_until_filtered(rewards: list[float], **settings: float) -> int | None:
    curation = FilterSolved(1, **settings)
    for number in range(200):
        if not curation.accepts(0, number):
            return number
        curation.observe(0, rewards)
    return None


@pytest.mark.parametrize(("rewards", "solved_reward"), [([40.0, 50.0], 40.0), ([0.5, 0.6], 0.5), ([-1.0], -1.0)])
def test_a_success_is_a_reward_of_at_least_the_threshold_whatever_the_scale(
    rewards: list[float], solved_reward: float
) -> None:
    """Defect 7: shares of successes are averaged, not rewards."""
    assert groups_until_filtered(rewards, solved_reward=solved_reward) == 29
    assert groups_until_filtered(rewards, solved_reward=solved_reward + 100.0) is None


def test_a_solved_prompt_is_revisited_by_chance_and_comes_back_when_it_is_forgotten() -> None:
    curation = FilterSolved(3, revisit=0.25)
    for _ in range(40):
        curation.observe(0, [1.0])
    visits = [curation.accepts(0, position) for position in range(400)]
    assert visits == [FilterSolved.accepts(curation, 0, position) for position in range(400)], "by position alone"
    assert 60 < sum(visits) < 140
    curation.observe(0, [0.0])
    assert all(curation.accepts(0, position) for position in range(50))


@pytest.mark.parametrize(("key", "value"), [("solved_reward", 0.5), ("revisit_solved", 0.1)])
def test_settings_of_filter_solved_are_refused_where_another_curation_is_chosen(key: str, value: float) -> None:
    tree = {"train": {"path": "tasks.jsonl"}, key: value}
    assert getattr(DataConfig.model_validate(tree | {"curation": "filter_solved"}), key) == value
    with pytest.raises(ValidationError, match=f"{key} is {value:g}, and curation: greso does not read it"):
        DataConfig.model_validate(tree | {"curation": "greso"})


def test_greso_halves_the_chance_with_every_further_equal_group_down_to_the_floor_of_its_kind() -> None:
    curation = Greso(seed=1)
    chances = []
    for _ in range(4):
        curation.observe(0, [0.0, 0.0])
        curation.observe(1, [1.0, 1.0])
        chances.append((curation.chance(0), curation.chance(1)))
    assert chances == [(0.5, 0.5), (0.3, 0.25), (0.3, 0.125), (0.3, 0.0625)]
    curation.observe(1, [1.0, 1.0])
    assert curation.chance(1) == 0.05
    curation.observe(1, [1.0, 0.0])
    assert curation.chance(1) == 1.0, "a group with unequal rewards ends the streak"
    curation.advanced()  # 4 of 10 groups were hard, 5 easy: more than is wanted of either kind
    assert (curation.p["easy"], curation.p["hard"]) == (0.49, 0.49)
    curation.observe(0, [1.0, 0.0])
    curation.advanced()
    assert (curation.p["easy"], curation.p["hard"]) == (0.5, 0.5)
    assert [curation.accepts(1, position) for position in range(9)] == [True] * 9
    curation.observe(1, [1.0, 1.0])
    played = [curation.accepts(1, position) for position in range(400)]
    assert 150 < sum(played) < 250
    assert curation.gauges()["curation_skipped"] == 400 - sum(played)


def test_a_prompt_is_played_while_its_pass_rate_lies_in_the_band() -> None:
    curation = PassRate(1, band=(0.25, 0.75), revisit_solved=0.5)
    for rewards, chance in (
        ([0, 0, 0, 0], 1.0), ([0, 0, 0, 0], 0.1), ([1, 1, 1, 1], 1.0), ([1, 1, 1, 0], 0.5), ([0, 0, 0, 1], 1.0), ([], 1.0),
    ):  # fmt: skip
        curation.observe(3, [float(reward) for reward in rewards])
        assert curation.chance(3) == chance
    assert curation.chance(4) == 1.0, "nothing is known of it"


@given(num_tasks=st.integers(1, 50), seed=st.integers(0, 5), passes=st.integers(1, 3))
def test_every_task_is_drawn_once_per_pass(num_tasks: int, seed: int, passes: int) -> None:
    curriculum = Curriculum(num_tasks, seed)
    rows = [curriculum.row(position) for position in range(num_tasks * passes)]
    for number in range(passes):
        assert sorted(rows[number * num_tasks : (number + 1) * num_tasks]) == list(range(num_tasks))
    assert rows[-1] == Curriculum(num_tasks, seed).row(len(rows) - 1), "a position is enough to go on"

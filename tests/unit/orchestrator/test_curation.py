"""Prompt curation: skipped prompts, the reasons, and the dependence on the seed alone."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.config.data import DataConfig
from services.orchestrator.tasks.orders import FilterSolved, Greso, PassRate


def test_a_prompt_is_filtered_once_its_average_reaches_the_limit_and_comes_back_when_it_falls() -> None:
    curation = FilterSolved(1, decay=0.5, limit=0.7)
    assert curation.accepts(7, 0), "nothing is known of it"
    curation.observe(7, [1.0] * 4)
    assert curation.accepts(7, 0), "one solved group is half of the average"
    curation.observe(7, [1.0] * 4)
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


def test_a_group_whose_rollouts_all_failed_says_nothing_about_its_prompt() -> None:
    curation = FilterSolved(1)
    curation.observe(0, [])
    assert curation.accepts(0, 0)


def test_greso_halves_the_chance_with_every_further_equal_group_down_to_the_floor_of_its_kind() -> None:
    curation = Greso(seed=1)
    chances = []
    for _ in range(4):
        curation.observe(0, [0.0, 0.0])
        curation.observe(1, [1.0, 1.0])
        chances.append((curation.probability(0), curation.probability(1)))
    assert chances == [(0.5, 0.5), (0.3, 0.25), (0.3, 0.125), (0.3, 0.0625)]
    curation.observe(1, [1.0, 1.0])
    assert curation.probability(1) == 0.05
    curation.observe(1, [1.0, 0.0])
    assert curation.probability(1) == 1.0, "a group with unequal rewards ends the streak"


GOLDEN = [1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0]


def test_greso_golden_course_under_a_fixed_seed() -> None:
    """Twelve prompts over ten versions: some always solved, some never, some mixed. A change is a change of every run."""
    curation = Greso(seed=7)
    played: list[str] = []
    chances: list[tuple[float, float]] = []
    position = 0
    for _ in range(10):
        decisions = ""
        for row in range(12):
            accepted = curation.accepts(row, position)
            decisions += str(int(accepted))
            position += 1
            if accepted:
                curation.observe(row, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]][row % 3])
        curation.advanced()
        played.append(decisions)
        chances.append((round(curation.p["easy"], 2), round(curation.p["hard"], 2)))
    assert played == COURSE
    assert chances == COURSE_CHANCES
    assert curation.gauges()["curation_skipped"] == sum(decisions.count("0") for decisions in COURSE)
    assert all(decisions[2::3] == "1111" for decisions in COURSE), "what brings a gradient is always played"


COURSE = [
    "111111111111",
    "111001001101",
    "011111001101",
    "011001001011",
    "011011111001",
    "011001001011",
    "101001101001",
    "101011001011",
    "011001001001",
    "101011001001",
]
COURSE_CHANCES = [
    (0.49, 0.49),
    (0.48, 0.5),
    (0.47, 0.49),
    (0.48, 0.48),
    (0.47, 0.47),
    (0.48, 0.46),
    (0.47, 0.47),
    (0.46, 0.46),
    (0.47, 0.45),
    (0.46, 0.46),
]


def test_a_prompt_is_played_while_its_pass_rate_lies_in_the_band() -> None:
    curation = PassRate(1, band=(0.25, 0.75), num_groups=2)
    for rewards, played in (
        ([0, 0, 0, 0], True), ([0, 0, 0, 0], False), ([1, 1, 1, 1], True), ([1, 1, 1, 0], False), ([0, 0, 0, 1], True),
    ):  # fmt: skip
        curation.observe(3, [float(reward) for reward in rewards])
        assert curation.accepts(3, 0) is played, f"{curation.rate(3)} over the last two groups"
    curation.observe(3, [])
    assert curation.rate(3) == 0.5, "failed rollouts say nothing about a prompt"
    assert curation.accepts(4, 1), "nothing is known of it"


def test_solved_and_impossible_prompts_are_revisited_each_with_its_own_chance() -> None:
    curation = PassRate(5, band=(0.1, 0.9), num_groups=1, revisit_solved=0.5, revisit_unsolved=0.1)
    curation.observe(0, [1.0, 1.0])
    curation.observe(1, [0.0, 0.0])
    visits = [sum(curation.accepts(row, position) for position in range(1000)) for row in (0, 1)]
    assert 430 < visits[0] < 570 and 60 < visits[1] < 140
    assert visits == [sum(curation.accepts(row, position) for position in range(1000)) for row in (0, 1)], (
        "by position alone"
    )
    assert curation.gauges() == {
        "curation_skipped": 2 * (2000 - sum(visits)), "curation_solved": 1.0, "curation_unsolved": 1.0
    }  # fmt: skip

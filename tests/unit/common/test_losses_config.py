"""Settings of the losses: a union by name, in which a setting that the chosen loss does not read is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.config.algorithm import IMPORT_PATH, LOSS_CLASSES
from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.config.training import PolicyConfig
from services.common.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart"


def load(*settings: str) -> PolicyConfig:
    return load_recipe(QUICKSTART, [f"policies.model0.algorithm.{s}" for s in settings], {}).policies["model0"]


@pytest.mark.parametrize("name", sorted(set(LOSS_CLASSES) - {IMPORT_PATH}))
def test_a_name_chooses_its_settings_class(name: str) -> None:
    section = PolicyConfig.model_validate({"algorithm": {"name": name}}).algorithm
    assert type(section) is LOSS_CLASSES[name]
    assert section.name == name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("c_clip=3",), ("model0.algorithm.c_clip: c_clip is no setting of m2po; ", "ppo_clip, grpo", " have it")),
        (("name=reinforce", "sapo_tau_negative=2"), ("sapo_tau_negative is no setting of reinforce; sapo has it",)),
        (("name=gspo", "c_clip=3"), ("c_clip is no setting of gspo",)),
        (("name=my_losses:clipped", "eps_clip=.1"), (f"eps_clip is no setting of {IMPORT_PATH}",)),
        (("settings={a: 1}",), (f"settings is no setting of m2po; {IMPORT_PATH} has it",)),
        (("m2po_treshold=.1",), ("algorithm.m2po_treshold: unknown key; did you mean 'm2po_threshold'?",)),
        (("name=ppoo",), ("algorithm.name: 'ppoo' is not valid", "'m2po'", IMPORT_PATH)),
        (("name=my losses:clipped",), ("algorithm.name: 'my losses:clipped' is not valid",)),
        (("name=[1]",), ("algorithm.name: '[1]' is not valid",)),
        (("advantage_eps=0",), ("algorithm.advantage_eps: 0 is not valid: it should be greater than 0",)),
        (("loss_aggregation=constant",), ("algorithm: loss_aggregation: constant needs constant_denominator",)),
        (("loss_aggregation=sum",), ("algorithm: loss_aggregation: sum needs constant_denominator",)),
        (("rejection=[{level: token}]",), ("algorithm.rejection.0: write lower, upper or both",)),
        (
            ("rejection=[{criterion: k3, lower: .1}]",),
            ("algorithm.rejection.0: lower is 0.1, and criterion: k3 does not read it",),
        ),
        (("rejection=[{lower: 2, upper: .5}]",), ("rejection.0: lower (2.0) must be below upper (0.5)",)),
        (("rejection=[{reduce: sum, upper: 2}]",), ("rejection.0: reduce is sum, and level: token does not read it",)),
        (
            ("rejection_denominator=kept",),
            ("algorithm: rejection_denominator: kept counts the tokens that rejection keeps",),
        ),
        (
            ("name=decoupled_ppo", "importance_level=none", "importance_cap=2"),
            ("importance_level: none has no weight that importance_cap",),
        ),
        (("rejection=[{uper: 2}]",), ("algorithm.rejection.0.uper: unknown key",)),
        (("name=cispo", "importance_level=none"), ("algorithm.importance_level: 'none' is not valid",)),
        (("name=tis", "importance_floor=7"), ("importance_floor (7.0) must be below importance_cap (5.0)",)),
        (("name=tis", "importance_normalize=maybe"), ("algorithm.importance_normalize: 'maybe' is not valid",)),
        (
            ("importance_cap=2",),
            ("importance_cap is no setting of m2po; m2po_mask, decoupled_ppo, tis and cispo have it",),
        ),
    ],
)
def test_what_a_loss_ignores_is_refused_with_the_losses_that_have_it(
    settings: tuple[str, ...], told: tuple[str, ...]
) -> None:
    """Review, defect 10: `m2po` took `c_clip`, `reinforce` took `sapo_tau`, and ignored them."""
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    assert all(part in caught.value.message for part in told), caught.value.message


@pytest.mark.parametrize("advantage", ["{advantage: max_rl}", "{advantage: pass_at_k, pass_k: 2}"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["rollout.on_truncation=penalise", "rollout.truncation_reward=-0.5"],
            "rollout.truncation_reward is -0.5, and policies.model0.algorithm.advantage: ",
        ),
        (["rollout.timeout_reward=-1"], "rollout.timeout_reward is -1, and policies.model0.algorithm.advantage: "),
        (
            ["policies.model0.batch.overlong_penalty={max_tokens: 9, buffer_tokens: 4}"],
            "batch.overlong_penalty makes others: leave one of them out",
        ),
        (["policies.model0.algorithm.reward_bias=-1"], "leave reward_bias and reward_scale out"),
    ],
)
def test_rewards_that_an_advantage_cannot_be_made_from_are_refused_before_the_run(
    advantage: str, settings: list[str], told: str
) -> None:
    """The trainer refuses them too, but when the first rollout of that kind is in a batch."""
    own = f"policies.model0.algorithm={advantage}"
    assert load_recipe(QUICKSTART, [own, "rollout.timeout_reward=0"], {})
    with pytest.raises(ConfigError) as caught:
        load_recipe(QUICKSTART, [own, *settings], {})
    assert told in caught.value.message


def test_a_clip_that_halves_the_reward_of_success_does_not_go_with_pass_at_k() -> None:
    with pytest.raises(ConfigError, match=r"needs rewards of 0 or 1, and reward_clip 0\.5 makes others"):
        load("advantage=pass_at_k", "pass_k=2", "reward_clip=0.5")
    assert load("advantage=pass_at_k", "pass_k=2", "reward_clip=1").algorithm.reward_clip == 1.0


def test_a_run_reads_back_the_loss_that_it_saved(tmp_path: Path) -> None:
    for settings in (["name=grpo", "c_clip=3"], ["name=my_losses:clipped", "settings={eps: 0.1, deep: {a: [1]}}"]):
        recipe = load_recipe(QUICKSTART, [f"policies.model0.algorithm.{s}" for s in settings], {})
        save_resolved(recipe, tmp_path)
        again = load_resolved(tmp_path).policies["model0"].algorithm
        assert again == recipe.policies["model0"].algorithm
        assert json.loads(again.model_dump_json())["name"] == settings[0].removeprefix("name=")


def test_a_run_of_a_version_whose_losses_shared_their_settings_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_resolved(load_recipe(QUICKSTART, [], {}), tmp_path)
    file = tmp_path / "recipe.json"
    tree = json.loads(file.read_text())
    tree["policies"]["model0"]["algorithm"]["sapo_tau_positive"] = 1.0
    file.write_text(json.dumps(tree))
    with pytest.raises(
        ConfigError, match=r"(?s)sapo has it.*another version of Rollmill began this run.*use that version"
    ):
        load_resolved(tmp_path)

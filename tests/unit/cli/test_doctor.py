"""The doctor names what the metrics show, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.doctor import FAILED_FETCHES, LEAST_POINTS, Failure, Verdict, change, diagnose
from services.cli.inspect.run_state import read_metrics
from services.common.config.loading import load_recipe, save_resolved
from services.common.config.recipe import Recipe
from services.common.records import WeightTransfer
from services.common.telemetry.metrics import StallMoment
from services.orchestrator.journal.entries import DatasetScore, Estimate
from services.orchestrator.metrics import RunMetrics
from services.orchestrator.stalls import Cause
from tests.unit.cli.test_evaluate import result_of

ROOT = Path(__file__).resolve().parents[3]
STEPS = 40


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(ROOT / "recipes" / "quickstart", ["run.id=run0"])


class Recorded:
    """The metrics of a run that learns, unless told otherwise, written by the real recorder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.metrics = RunMetrics(run_dir, tensorboard=False)

    def steps(self, number: int = STEPS, **series: Any) -> None:
        """Values of metrics, or functions of the share of the run that is done, by their key with ``__`` for a slash."""
        noise = random.Random(3)
        for step in range(1, number + 1):
            done = step / number
            values = {
                "rollouts_finished": 64.0, "failures": 0.0, "timeouts": 0.0, "groups_equal_dropped": 0.0,
                "rollout_reward_mean": 0.1 + 0.7 * done + noise.gauss(0, 0.04), "num_trained_tokens": 900.0,
                "response_tokens_mean": 14 + 3 * done, "trainer/entropy": 0.4 - 0.3 * done, "trainer/grad_norm": 0.5,
                "trainer/mismatch_fresh_abs": 1e-6, "trainer/fresh_share": 0.5, "trainer/advantage_abs_mean": 0.6,
                "trainer/learning_rate": 1e-3, "trainer/updates_applied": 1.0,
            }  # fmt: skip
            given = {key.replace("__", "/"): value for key, value in series.items()}
            values |= {key: value(done) if callable(value) else value for key, value in given.items()}
            self.metrics.training_step("model0", step, values)

    def transfers(self, *errors: str) -> None:
        for version, error in enumerate(errors, start=1):
            self.metrics.weight_transfer("a", WeightTransfer(policy="model0", version=version, error=error))

    def verdict(self, recipe: Recipe) -> Verdict:
        self.metrics.close()
        return diagnose(read_metrics(self.run_dir), recipe)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    found = Recorded(tmp_path)
    yield found
    found.metrics.close()


def failures(verdict: Verdict) -> list[Failure]:
    return [finding.failure for finding in verdict.findings]


def flat(done: float) -> float:
    return 0.3 + 0.02 * (-1) ** round(done * STEPS)


@pytest.mark.parametrize(("difference", "expected"), [(0.04, []), (0.06, [Failure.MISMATCH])])
def test_rounding_of_bfloat16_is_no_finding(recorded: Recorded, difference: float, expected: list[Failure]) -> None:
    rounded = load_recipe(
        ROOT / "recipes" / "quickstart", ["run.id=run0", "policies.model0.weights.publish_dtype=bfloat16",
                                          "policies.model0.trainer.max_mismatch=1.0"],
    )  # fmt: skip
    recorded.steps(trainer__mismatch_fresh_abs=difference)
    assert failures(recorded.verdict(rounded)) == expected, "what was accepted is told as well"


def test_a_refused_batch_is_a_finding_of_its_policy(recorded: Recorded, recipe: Recipe) -> None:
    recorded.metrics.stall(StallMoment.BEGIN, "trainer/model0", Cause.NUMERICS.value, "likely cause: rope base", 0.0)
    (finding,) = recorded.verdict(recipe).findings
    assert finding.failure is Failure.MISMATCH and finding.evidence == "likely cause: rope base"


def test_a_run_that_learns_has_no_finding(recorded: Recorded, recipe: Recipe) -> None:
    recorded.steps(rollout_reward_mean=flat)
    recorded.steps()  # repeated after a recovery: the last row of a step counts
    recorded.transfers("", "", "no answer", "no answer", "")
    for moment in (StallMoment.BEGIN, StallMoment.END):
        recorded.metrics.stall(moment, "workflow", Cause.ALL_FILTERED, "64 groups", 9.0)
    verdict = recorded.verdict(recipe)
    assert failures(verdict) == [] and verdict.learning[0].learned
    assert verdict.learning[0].num_steps == STEPS


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ({}, Failure.NOTHING_LEARNED),
        ({"failures": 30.0}, Failure.SAMPLES_MASKED),
        ({"sequences_truncated_masked": 30.0}, Failure.SAMPLES_MASKED),
        ({"rollout_reward_mean": 0.0, "trainer__advantage_abs_mean": 0.0}, Failure.REWARD_CONSTANT),
        ({"trainer__advantage_abs_mean": 0.0}, Failure.GROUPS_EQUAL),
        ({"groups_equal_dropped": 8.0}, Failure.GROUPS_EQUAL),
        ({"trainer__mismatch_fresh_abs": lambda done: 0.3 * done}, Failure.MISMATCH),
        ({"trainer__mismatch_fresh_abs": 0.04}, Failure.MISMATCH),  # from the first step, in float32
        ({"trainer__fresh_share": 0.0, "trainer__mismatch_abs": lambda done: 2 * done}, Failure.MISMATCH),
        ({"trainer__entropy": lambda done: 0.4 * (1 - done) ** 4}, Failure.ENTROPY_GONE),
        ({"response_tokens_mean": lambda done: 14 + 30 * done}, Failure.LENGTHS_RUN_AWAY),
    ],
)
def test_each_failure_is_named_first(
    recorded: Recorded, recipe: Recipe, series: dict[str, Any], expected: Failure
) -> None:
    recorded.steps(**{"rollout_reward_mean": flat, **series})
    verdict = recorded.verdict(recipe)
    assert failures(verdict)[0] is expected
    assert all(finding.evidence and finding.remedy for finding in verdict.findings)


@pytest.mark.parametrize(
    "series",
    [
        {"trainer__mismatch_fresh_abs": lambda done: 0.3 * done, "trainer__fresh_share": 0.0},  # of no fresh token
        {"trainer__mismatch_abs": lambda done: 0.3 * done, "trainer__fresh_share": 0.0},  # the policy moves
        {"trainer__entropy": 0.001},  # a policy that was sure from the beginning and gets better
        {"response_tokens_mean": lambda done: 14 + 60 * done},  # it thinks longer, and is right more often
        {"groups_equal_dropped": lambda done: 8 * done},  # tasks that are solved
        {"failures": 5.0},
    ],
)
def test_a_run_that_learns_may_have_odd_numbers(recorded: Recorded, recipe: Recipe, series: dict[str, Any]) -> None:
    recorded.steps(**series)
    assert failures(recorded.verdict(recipe)) == []


def test_failed_transfers_in_a_row_are_named_with_the_version_held_and_the_error(
    recorded: Recorded, recipe: Recipe
) -> None:
    recorded.steps(8)
    recorded.transfers("", "", *["digest differs"] * FAILED_FETCHES)
    finding = recorded.verdict(recipe).findings[0]
    assert finding.failure is Failure.WEIGHTS_NOT_ARRIVING
    assert "since version 2" in finding.evidence and "digest differs" in finding.evidence


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.ALL_FILTERED, Failure.GROUPS_EQUAL),
        (Cause.WEIGHTS_NOT_ARRIVING, Failure.WEIGHTS_NOT_ARRIVING),
        (Cause.ALL_FAIL, Failure.SAMPLES_MASKED),
    ],
)
def test_a_run_that_stands_still_before_its_first_step_is_named_by_its_stall(
    recorded: Recorded, recipe: Recipe, cause: Cause, expected: Failure
) -> None:
    recorded.metrics.stall(StallMoment.BEGIN, "workflow", cause, "64 groups, none of use", 0.0)
    verdict = recorded.verdict(recipe)
    assert failures(verdict) == [expected] and verdict.learning[0].learned is None
    assert "64 groups" in verdict.findings[0].evidence


def evaluate(recorded: Recorded, step: int, reward: float, gain: float | None) -> None:
    """An evaluation of 256 tasks; ``gain`` is that from the first one."""
    difference = None if gain is None else Estimate(value=gain, low=gain - 0.05, high=gain + 0.05)
    mean = Estimate(value=reward, low=reward - 0.05, high=reward + 0.05)
    score = DatasetScore(name="held_out", num_items=256, samples_per_item=1, mean_reward=mean, pass_at=(), failed=(),
                         items="x", difference=difference)  # fmt: skip
    name = f"{'start' if not step else f'step-{step}'}/sampled"
    recorded.metrics.evaluation(result_of(score, policy="model0", name=name, version=step, difference=difference))


def test_a_gain_in_an_evaluation_is_learning_though_rollouts_show_none(recorded: Recorded, recipe: Recipe) -> None:
    recorded.steps(rollout_reward_mean=flat)  # as with a curriculum
    evaluate(recorded, 0, 0.3, None)
    evaluate(recorded, STEPS, 0.5, 0.2)
    verdict = recorded.verdict(recipe)
    assert verdict.learning[0].learned and verdict.learning[0].measured == "evaluation sampled" and not verdict.findings


def test_a_reward_that_rises_while_every_evaluation_falls_is_no_learning(recorded: Recorded, recipe: Recipe) -> None:
    recorded.steps()
    evaluate(recorded, 0, 0.5, None)
    evaluate(recorded, STEPS, 0.1, -0.4)
    verdict = recorded.verdict(recipe)
    assert failures(verdict) == [Failure.NOTHING_LEARNED]
    assert (
        "training rollouts" in verdict.findings[0].evidence
        and "pays for what the evaluation" in verdict.findings[0].remedy
    )


@given(
    level=st.floats(-100, 100), scale=st.floats(0.01, 10), gain=st.floats(8, 50), number=st.integers(LEAST_POINTS, 200)
)
def test_a_change_beyond_the_noise_is_seen_at_any_level_and_scale(
    level: float, scale: float, gain: float, number: int
) -> None:
    draw = random.Random(number)
    found = change([level + scale * (draw.uniform(-1, 1) + gain * step / number) for step in range(number)])
    assert found is not None and found.low > 0


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_command_tells_evidence_and_remedy_and_exits_with_1(recorded: Recorded, recipe: Recipe) -> None:
    save_resolved(recipe, recorded.run_dir)
    recorded.steps(rollout_reward_mean=0.0, trainer__advantage_abs_mean=0.0)
    told = CliRunner().invoke(app, ["doctor", str(recorded.run_dir)])
    assert told.exit_code == 1
    assert (
        "the reward is constant" in told.output and "seen:" in told.output and "workflow.settings.reward" in told.output
    )
    verdict = json.loads(CliRunner().invoke(app, ["doctor", str(recorded.run_dir), "--json"]).output)
    assert verdict["nothing_learned"] and verdict["findings"][0]["failure"] == "reward_constant"


@pytest.mark.parametrize(("wanted", "code"), [(True, 3), (False, 0)])
def test_a_run_that_learned_nothing_fails_where_the_recipe_says_so(
    recorded: Recorded, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, wanted: bool, code: int
) -> None:
    from services.cli.run import directory as resume
    from services.cli.run import launch

    recorded.steps(rollout_reward_mean=flat)
    run = recipe.run.model_copy(update={"fail_when_nothing_learned": wanted})
    chosen = recipe.model_copy(update={"run": run})
    save_resolved(chosen, recorded.run_dir)
    outcome = {"steps": {}, "evaluations": {}}, None
    monkeypatch.setattr(launch, "run", lambda *_: outcome)
    monkeypatch.setattr(resume, "reopen", lambda *_: (chosen, recorded.run_dir))
    told = CliRunner().invoke(app, ["run", "--resume", str(recorded.run_dir)])
    assert told.exit_code == code and "has not learned" in told.output

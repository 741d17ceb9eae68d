"""The production recipes: valid as a whole, every setting pinned, and variants that differ in one thing.

test_reference.py compares them with their references.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.check import recipe as check
from services.cli.check.memory import GIB, estimates, misfits
from services.cli.check.recipe import check_launch
from services.common.config.loading import load_recipe
from services.common.config.processes import engine_numbers, gpu_claims
from services.common.errors import ConfigError
from services.envgateway.sandbox.records import ExecutionLimits
from tests.unit.recipes.golden import (
    DEFAULTS,
    GOLDEN,
    REPOSITORY,
    defaults_of,
    golden_file,
    load,
    read,
    recipes,
    resolved,
    same,
    schema_defaults,
)


@pytest.mark.parametrize("name", recipes())
def test_evaluation_data_have_the_limit_of_training_and_small_sets_of_math_more_samples(name: str) -> None:
    recipe = load(name)
    many = {"aime24", "aime25", "amc24"} if name.startswith("math-multi-agent") else set()
    for dataset in recipe.data.evaluation.values():
        assert dataset.max_prompt_tokens == recipe.data.train.max_prompt_tokens
        assert dataset.samples_per_task == (16 if dataset.name in many else None)


@pytest.mark.parametrize("name", recipes())
def test_every_resolved_setting_is_the_golden_one_or_the_default(name: str) -> None:
    recipe = load(name)
    golden, settings, defaults = read(golden_file(name)), resolved(recipe), defaults_of(recipe)
    assert [path for path in golden if not same(settings, path, golden[path])] == []
    unnamed = [path for path in settings if path not in golden and not same(defaults, path, settings[path])]
    assert unnamed == [], "run `python -m tests.unit.recipes.golden` and read the diff against the reference"


def test_no_default_changes_unseen() -> None:
    now = {path: value for name in recipes() for path, value in schema_defaults(load(name)).items()}
    assert [path for path, value in read(DEFAULTS).items() if not same(now, path, value)] == []


def test_there_is_no_golden_file_without_a_recipe() -> None:
    assert {file.name for file in GOLDEN.glob("*.json")} == {DEFAULTS.name, *(golden_file(n).name for n in recipes())}


@pytest.fixture
def livecodebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with only the files that are fetched by hand."""
    file = tmp_path / "AReaL-boba-2-RL-Code" / "code_benchmark" / "lcb_v5" / "test.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"question": "Double it.", "input_output": {"inputs": ["1"], "outputs": ["2"]}}) + "\n")
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    return file


@pytest.mark.parametrize("name", recipes())
def test_check_passes(name: str, livecodebench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ports_in_use", lambda recipe: [])  # of whatever runs on this machine
    recipe = load(name)
    check.check_recipe(recipe)
    check.describe(recipe)


@pytest.mark.parametrize("name", ["code/qwen3-8b-m2po-delta"])
def test_without_livecodebench_nothing_starts(name: str, livecodebench: Path, tmp_path: Path) -> None:
    livecodebench.unlink()
    console = Console(width=1000, record=True)
    console.print(check.describe(load(name)))
    with pytest.raises(ConfigError) as caught:
        check_launch(load(name))
    for text in (caught.value.message, console.export_text()):
        for told in (
            "data.evaluation.livecodebench_v5",
            str(livecodebench),
            "hf download inclusionAI/AReaL-boba-2-RL-Code --repo-type dataset --local-dir "
            f"{tmp_path}/AReaL-boba-2-RL-Code",
        ):
            assert told in text


@pytest.mark.parametrize("name", recipes())
def test_each_policy_has_engines_a_trainer_and_a_publisher(name: str) -> None:
    recipe = load(name)
    for policy, section in recipe.policies.items():
        assert section.trainer.gpus and section.trainer.port and section.weights.port
        for service in recipe.inference.values():
            assert engine_numbers(service, service.policies or list(recipe.policies))[policy] >= 1
    claims = [(claim.node, gpu) for claim in gpu_claims(recipe.inference, recipe.policies) for gpu in claim.gpus]
    assert len(claims) == len(set(claims)) == (16 if name.endswith("2node") else 8)


@pytest.mark.parametrize("name", recipes())
def test_it_fits_into_80_gib_with_float32_masters_and_moments_on_the_host_for_two_trainers(name: str) -> None:
    recipe = load(name)
    assert misfits(recipe) == []
    assert all(estimate.total < 75 * GIB for estimate in estimates(recipe))
    for section in recipe.policies.values():
        assert section.trainer.master_dtype == "float32"
        assert section.trainer.offload == (["optimizer"] if section.trainer.num_ranks == 2 else [])


def differences(one: str, other: str) -> set[str]:
    first, second = resolved(load(one)), resolved(load(other))
    different = {path for path in {*first, *second} if first.get(path, ...) != second.get(path, ...)}
    return different - {"name", "description"}


@pytest.mark.parametrize(
    "family", ["code/qwen3-8b-m2po", "alfworld/qwen2.5-7b-instruct-m2po", "webshop/qwen2.5-7b-instruct-m2po"]
)
def test_full_and_delta_differ_in_how_weights_travel(family: str) -> None:
    transfer = {"policies.model0.weights.transfer", "policies.model0.weights.full_every"}
    assert differences(f"{family}-full", f"{family}-delta") == transfer


@pytest.mark.parametrize("kind", ["actor-verifier", "single-agent"])
@pytest.mark.parametrize("data", ["dapo", "deepscaler"])
def test_off_means_that_dynamic_sampling_is_off(kind: str, data: str) -> None:
    start = f"math-multi-agent/qwen3-8b-{kind}-m2po-delta"
    policies = ("model0", "model1") if kind == "actor-verifier" else ("model0",)
    changed = differences(f"{start}-{data}-data", f"{start}-no-ds-{data}-data")
    sampling = {f"policies.{policy}.batch.dynamic_sampling" for policy in policies}
    assert sampling <= changed
    # On DAPO the reference's recipes also differ in their engines, and in how much is evaluated at once.
    engines = {f"inference.{name}.sglang.{key}" for name in "ab" for key in ("memory_share", "max_running_requests")}
    also = {"actor-verifier": engines, "single-agent": {"evaluation.max_in_flight"}}[kind] if data == "dapo" else set()
    assert changed - sampling == also
    assert not any(p.batch.dynamic_sampling for p in load(f"{start}-no-ds-{data}-data").policies.values())


def test_the_small_model_differs_in_itself_and_its_engines() -> None:
    assert differences("rstar2/qwen2.5-7b-instruct-grpo-roc", "rstar2/qwen2.5-1.5b-instruct-grpo-roc") == {
        "policies.model0.model.path",
        "inference.a.sglang.tensor_parallel",
        "inference.a.sglang.max_running_requests",
    }


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("code")])
def test_six_seconds_of_a_case_are_six_seconds_in_the_sandbox(name: str) -> None:
    recipe = load(name)
    assert recipe.envgateway is not None
    asked = [recipe.envgateway.code.case_time_s, resolved(recipe).get("workflow.settings.case_time_s", 6.0)]
    assert asked == [6.0, 6.0]
    for seconds in asked:
        limits = ExecutionLimits(wall_s=seconds).within(recipe.envgateway.sandbox)
        assert (limits["wall_s"], limits["cpu_s"]) == (6.0, 6.0)


def test_the_coder_alone_is_evaluated_as_the_baseline_is() -> None:
    pair = load("code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node")
    single = load("code-multi-agent/qwen3-8b-single-agent-m2po-full")
    assert pair.evaluation.workflow == single.workflow
    assert pair.evaluation.policies == ["model0"]
    assert (pair.data, pair.sampling, pair.evaluation.samplings) == (
        single.data,
        single.sampling,
        single.evaluation.samplings,
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("alfworld/qwen2.5-7b-instruct-m2po-full", "alfworld"),
        ("webshop/qwen2.5-7b-instruct-m2po-full", "envgateway.webshop.data"),
    ],
)
def test_without_its_world_nothing_starts_unless_a_server_plays_it(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [80.0] * 8)
    monkeypatch.setattr("services.cli.check.recipe._error_of", lambda python, program: "")  # torch sees them
    monkeypatch.setattr("services.cli.check.recipe.hub_problems", lambda recipe: [])
    monkeypatch.setattr("services.cli.check.memory.host_memory_bytes", lambda: 1e12)
    monkeypatch.setattr("services.cli.check.memory.shared_memory_here", lambda: 1e12)
    with pytest.raises(ConfigError, match=told):
        check_launch(load(name).model_copy(update={"inference": {}}))
    world = name.partition("/")[0]
    external = load_recipe(
        REPOSITORY / "recipes" / name, [f"envgateway.agentbench.{world}.url=http://127.0.0.1:1/api"], {}
    )
    check_launch(external.model_copy(update={"inference": {}}))


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith(("alfworld", "webshop"))])
def test_agents_are_evaluated_with_the_truncation_they_are_trained_with(name: str) -> None:
    recipe = load(name)
    (sampling,) = recipe.evaluation.samplings.values()
    assert sampling == recipe.sampling.model_copy(update={"temperature": 0.6})
    assert (sampling.top_p, sampling.top_k) == (0.95, 50)

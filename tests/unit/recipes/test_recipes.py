"""The production recipes: settings as the reference gives them, valid as a whole, and variants that differ in one thing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from services.cli import check
from services.cli.launch_checks import check_launch
from services.cli.memory_estimate import GIB, estimates, misfits
from services.common.config.loading import load_recipe
from services.common.config.placement import engine_numbers, gpu_claims
from services.common.errors import ConfigError
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


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the reference's tables say of one recipe."""

    workflow: str
    model: str
    steps: int
    batch: int  # sequences of each policy
    minibatches: int
    lr: float
    threshold: float | None  # M2PO
    context: int
    max_new_tokens: int
    token_budget: int
    transfer: Literal["full", "delta"]
    data: str
    evaluation: set[str]
    evaluation_every: int
    repeats: int
    checkpoint_every: int
    concurrent_prompts: int
    group: int = 8
    staleness: int = 8
    dynamic_sampling: bool = True
    max_prompt_tokens: int | None = 2000
    running_requests: int | None = None
    memory_share: float = 0.8
    inference: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)  # GPUs of the services on node 0
    trainers: tuple[tuple[int, ...], ...] = ((4, 5, 6, 7),)


MATH_SETS = {"aime24", "aime25", "amc23", "minerva-math", "math500"}
CODE_SETS = {"humaneval", "livecodebench-v5", "deepcoder-codeforces"}
PAIR = {"inference": ((0, 1), (2, 3)), "trainers": ((4, 5), (6, 7))}


def math_facts(*, pair: bool, filtered: bool, dapo: bool) -> Facts:
    return Facts(
        workflow="actor_verifier" if pair else "single_turn", model="Qwen/Qwen3-8B", steps=1200, batch=256, minibatches=4,
        lr=5e-6, threshold=0.01, context=16_384, max_new_tokens=4096, token_budget=17_408, transfer="delta",
        data="dapo-math-17k" if dapo else "deepscaler", evaluation=MATH_SETS, evaluation_every=25, repeats=4,
        checkpoint_every=26, concurrent_prompts=1024 if dapo else 256, dynamic_sampling=filtered,
        running_requests=None if dapo else 48, **(PAIR if pair else {}),  # type: ignore[arg-type]
    )  # fmt: skip


def code_facts(workflow: str, steps: int, batch: int, minibatches: int, transfer: Literal["full", "delta"]) -> Facts:
    two_nodes = workflow == "codegen_verifier"
    return Facts(
        workflow=workflow, model="Qwen/Qwen3-8B", steps=steps, batch=batch, minibatches=minibatches, lr=3e-6,
        threshold=0.01, context=12_288, max_new_tokens=4096, token_budget=14_000 if two_nodes else 22_000,
        transfer=transfer, data="deepcoder-primeintellect", evaluation=CODE_SETS, evaluation_every=25, repeats=2,
        checkpoint_every=25, concurrent_prompts=256, max_prompt_tokens=6000, running_requests=48,
        trainers=((4, 5), (6, 7)) if two_nodes else ((4, 5, 6, 7),),
    )  # fmt: skip


def agent_facts(world: str, transfer: Literal["full", "delta"]) -> Facts:
    alfworld = world == "alfworld"
    return Facts(
        workflow="agent_env", model="Qwen/Qwen2.5-7B-Instruct", steps=1200, batch=128 if alfworld else 256, minibatches=4,
        lr=1e-6, threshold=0.004, context=16_384, max_new_tokens=512, token_budget=20_384, transfer=transfer,
        data=f"{world}-train", evaluation={f"{world}-valid"}, evaluation_every=10, repeats=4, checkpoint_every=25,
        concurrent_prompts=256, max_prompt_tokens=None, running_requests=48 if alfworld else None,
        memory_share=0.7 if alfworld else 0.6,
    )  # fmt: skip


FACTS = {
    f"math-multi-agent/qwen3-8b-{kind}-m2po-delta-{'' if filtered else 'no-ds-'}{'dapo' if dapo else 'deepscaler'}-data":
        math_facts(pair=kind == "actor-verifier", filtered=filtered, dapo=dapo)
    for kind in ("actor-verifier", "single-agent") for filtered in (True, False) for dapo in (True, False)
} | {
    "code/qwen3-8b-m2po-full": code_facts("single_turn", 1200, 128, 2, "full"),
    "code/qwen3-8b-m2po-delta": code_facts("single_turn", 1200, 128, 2, "delta"),
    "code-multi-agent/qwen3-8b-single-agent-m2po-full": code_facts("single_turn", 1500, 256, 4, "full"),
    "code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node": code_facts("codegen_verifier", 800, 256, 4, "full"),
    "alfworld/qwen2.5-7b-instruct-m2po-full": agent_facts("alfworld", "full"),
    "alfworld/qwen2.5-7b-instruct-m2po-delta": agent_facts("alfworld", "delta"),
    "webshop/qwen2.5-7b-instruct-m2po-full": agent_facts("webshop", "full"),
    "webshop/qwen2.5-7b-instruct-m2po-delta": agent_facts("webshop", "delta"),
    "rstar2/qwen2.5-7b-instruct-grpo-roc": Facts(
        workflow="tool_math", model="Qwen/Qwen2.5-7B-Instruct", steps=150, batch=128 * 16, minibatches=1, lr=1e-6,
        threshold=None, context=32_768, max_new_tokens=8192, token_budget=20_480, transfer="delta", data="dapo-math-17k",
        evaluation={"aime24", "aime25", "math500"}, evaluation_every=25, repeats=4, checkpoint_every=10,
        concurrent_prompts=128, group=32, staleness=1, max_prompt_tokens=2048, running_requests=128, memory_share=0.5,
    ),
}  # fmt: skip


def test_these_are_the_recipes() -> None:
    assert recipes() == sorted(FACTS)
    assert len(FACTS) == 17


@pytest.mark.parametrize("name", sorted(FACTS))
def test_the_tables_of_the_reference_are_reproduced(name: str) -> None:
    recipe, facts = load(name), FACTS[name]
    found = {
        Facts(
            workflow=recipe.workflow.name,
            model=str(policy.model.path),
            steps=recipe.run.steps,
            batch=policy.batch.size,
            minibatches=policy.batch.minibatches,
            lr=policy.optimizer.lr,
            threshold=policy.algorithm.m2po_threshold if policy.algorithm.name == "m2po" else None,
            context=policy.model.context_length,
            max_new_tokens=recipe.sampling.max_new_tokens,
            token_budget=policy.trainer.token_budget,
            transfer=policy.weights.transfer,
            data=str(recipe.data.train.name),
            evaluation=frozenset(str(data.name) for data in recipe.data.evaluation.values()),  # type: ignore[arg-type]
            evaluation_every=recipe.evaluation.every,
            repeats=recipe.evaluation.samples_per_task,
            checkpoint_every=policy.trainer.checkpoint_every,
            concurrent_prompts=service.num_slots // recipe.rollout.group_size,
            group=recipe.rollout.group_size,
            staleness=policy.batch.max_staleness,
            dynamic_sampling=policy.batch.dynamic_sampling,
            max_prompt_tokens=recipe.data.train.max_prompt_tokens,
            running_requests=service.sglang.max_running_requests,
            memory_share=service.sglang.memory_share,
            inference=tuple(tuple(s.gpus) for s in recipe.inference.values() if s.node == 0),
            trainers=tuple(tuple(p.trainer.gpus) for p in recipe.policies.values()),
        )
        for policy in recipe.policies.values()
        for service in recipe.inference.values()
    }
    expected = Facts(**{**vars(facts), "evaluation": frozenset(facts.evaluation)})
    assert found == {expected}  # of every policy and every service


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_resolved_setting_is_the_golden_one_or_the_default(name: str) -> None:
    recipe = load(name)
    golden, settings, defaults = read(golden_file(name)), resolved(recipe), defaults_of(recipe)
    assert [path for path in golden if not same(settings, path, golden[path])] == []
    unnamed = [path for path in settings if path not in golden and not same(defaults, path, settings[path])]
    assert unnamed == [], "run `python -m tests.unit.recipes.golden` and read the diff against the reference"


def test_no_default_changes_unseen() -> None:
    now = {path: value for name in FACTS for path, value in schema_defaults(load(name)).items()}
    assert [path for path, value in read(DEFAULTS).items() if not same(now, path, value)] == []


def test_there_is_no_golden_file_without_a_recipe() -> None:
    assert {file.name for file in GOLDEN.glob("*.json")} == {DEFAULTS.name, *(golden_file(n).name for n in FACTS)}


@pytest.fixture
def livecodebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root that holds nothing but what is fetched by hand."""
    file = tmp_path / "AReaL-boba-2-RL-Code" / "code_benchmark" / "lcb_v5" / "test.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"question": "Double it.", "input_output": {"inputs": ["1"], "outputs": ["2"]}}) + "\n")
    monkeypatch.setenv("MILLRACE_DATA_ROOT", str(tmp_path))
    return file


@pytest.mark.parametrize("name", sorted(FACTS))
def test_check_passes(name: str, livecodebench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ports_in_use", lambda recipe: [])  # of whatever runs on this machine
    recipe = load(name)
    check.check_recipe(recipe)
    check.describe(recipe)


@pytest.mark.parametrize("name", [name for name in sorted(FACTS) if name.startswith("code")])
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


def test_the_run_command_refuses_before_it_makes_a_run(livecodebench: Path, tmp_path: Path) -> None:
    livecodebench.unlink()
    command = [sys.executable, "-m", "services.cli", "run", "recipes/code/qwen3-8b-m2po-full"]
    done = subprocess.run(
        [*command, "--set", f"run.dir={tmp_path / 'runs'}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "lcb_v5/test.jsonl" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", sorted(FACTS))
def test_each_policy_has_engines_a_trainer_and_a_publisher(name: str) -> None:
    recipe = load(name)
    for policy, section in recipe.policies.items():
        assert section.trainer.gpus and section.trainer.port and section.weights.port
        for service in recipe.inference.values():
            assert engine_numbers(service, service.policies or list(recipe.policies))[policy] >= 1
    claims = [(claim.node, gpu) for claim in gpu_claims(recipe.inference, recipe.policies) for gpu in claim.gpus]
    assert len(claims) == len(set(claims)) == (16 if name.endswith("2node") else 8)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_it_fits_into_80_gib_and_two_trainers_of_8b_only_as_bfloat16(name: str) -> None:
    recipe = load(name)
    assert misfits(recipe) == []
    assert all(estimate.total < 75 * GIB for estimate in estimates(recipe))
    for section in recipe.policies.values():
        assert section.trainer.master_dtype == ("bfloat16" if section.trainer.num_ranks == 2 else "float32")


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
def test_off_means_that_only_dynamic_sampling_is_off(kind: str, data: str) -> None:
    start = f"math-multi-agent/qwen3-8b-{kind}-m2po-delta"
    policies = ("model0", "model1") if kind == "actor-verifier" else ("model0",)
    changed = differences(f"{start}-{data}-data", f"{start}-no-ds-{data}-data")
    assert changed == {f"policies.{policy}.batch.dynamic_sampling" for policy in policies}
    assert not any(p.batch.dynamic_sampling for p in load(f"{start}-no-ds-{data}-data").policies.values())


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
    monkeypatch.setattr("services.cli.launch_checks.gpus_here", lambda: [80.0] * 8)
    with pytest.raises(ConfigError, match=told):
        check_launch(load(name).model_copy(update={"inference": {}}))
    world = name.partition("/")[0]
    external = load_recipe(
        REPOSITORY / "recipes" / name, [f"envgateway.agentbench.{world}.url=http://127.0.0.1:1/api"], {}
    )
    check_launch(external.model_copy(update={"inference": {}}))


@pytest.mark.parametrize("name", [name for name in sorted(FACTS) if name.startswith(("alfworld", "webshop"))])
def test_agents_are_evaluated_with_the_truncation_they_are_trained_with(name: str) -> None:
    recipe = load(name)
    (sampling,) = recipe.evaluation.samplings.values()
    assert sampling == recipe.sampling.model_copy(update={"temperature": 0.6})
    assert (sampling.top_p, sampling.top_k) == (0.95, 50)

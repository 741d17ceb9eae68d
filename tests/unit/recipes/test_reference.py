"""The recipes against AstraFlow's 343e808 and RLinf's a3816b5: each key with a counterpart here has the same value.

``reference_recipes/settings.json`` of the data root has their files: recipe -> file -> key -> value. The READMEs of the
families tell the keys that depart, and those without a counterpart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.common.config.processes import engine_numbers
from services.common.config.recipe import Recipe
from services.orchestrator.tasks.rows import known
from tests import needs
from tests.unit.recipes.golden import load, recipes, resolved

Reader = Callable[[Recipe, str], Any]  # of the recipe and the service that a file starts ("*" for all)
Conversion = Callable[[Any, Recipe], Any] | Mapping[Any, Any]  # a value there -> the value here that says the same


@dataclass(frozen=True, slots=True)
class Same:
    """A key there, as a pattern of which ``{x}`` matches any name, and the setting here."""

    key: str
    here: str | Reader  # a path, of which ``*`` matches any name and a number at its end is a place in a list
    convert: Conversion = field(default_factory=dict)
    of: str = ""  # begins the names of the recipes there


def number(value: Any, recipe: Recipe) -> float:
    return float(value)


def hub_name(value: Any, recipe: Recipe) -> str:
    return f"Qwen/{str(value).rpartition('/')[2]}"


def kept_rollouts(value: Any, recipe: Recipe) -> int:
    """Prompts -> the samples that resampling keeps of them."""
    (policy,) = recipe.policies.values()
    assert policy.batch.resample is not None
    return int(value) * policy.batch.resample.keep


def engines(policy: str) -> Reader:
    def of_the_file(recipe: Recipe, service: str) -> int:
        some = [one for name, one in recipe.inference.items() if service in ("*", name)]
        return sum(engine_numbers(one, one.policies or list(recipe.policies))[policy] for one in some)

    return of_the_file


def catalogue(part: str, name: str) -> Reader:
    """A field of the catalogue's entry of a data set."""

    def entry(recipe: Recipe, service: str) -> Any:
        dataset = recipe.data.evaluation[part] if part else recipe.data.train
        return getattr(known(dataset.name or ""), name)

    return entry


def of_evaluation(setting: str) -> Reader:
    def value(recipe: Recipe, service: str) -> Any:
        workflow = recipe.evaluation.workflow or recipe.workflow
        return workflow.name if setting == "name" else workflow.settings.get(setting)

    return value


def longest_sequence(recipe: Recipe, service: str) -> int:
    settings = recipe.workflow.settings
    return int(settings["max_prompt_tokens"]) + int(settings["max_response_tokens"])


_SETS = "astraflow.dataflow.dataset."
DATASETS = {
    f"{_SETS}deepcoder_preview:get_deepcoder_preview_primeintellect_rl_dataset": "deepcoder-primeintellect",
    f"{_SETS}deepcoder_preview:get_deepcoder_preview_codeforces_test_dataset": "deepcoder-codeforces",
    f"{_SETS}livecodebench:get_livecodebench_single_turn_test_dataset": "livecodebench-v5",
    f"{_SETS}human_eval:get_human_eval_test_dataset": "humaneval",
    f"{_SETS}dapo_filter:get_dapo_filter_rl_dataset": "dapo-filter",
    f"{_SETS}deepscaler:get_deepscaler_rl_dataset": "deepscaler",
    f"{_SETS}aime24x4:get_aime_2024x4_test_dataset": "aime24",
    f"{_SETS}aime25x4:get_aime_2025x4_test_dataset": "aime25",
    f"{_SETS}amc24:get_amc_2024x4_test_dataset": "amc24",
    f"{_SETS}math500:get_math500_test_dataset": "math500",
    f"{_SETS}minervamath:get_minerva_math_test_dataset": "minerva-math",
} | {
    f"astraEnv/AgentBench/data/{world}/{part}_indices.jsonl": f"{world}-{part}"
    for world in ("alfworld", "webshop")
    for part in ("train", "valid")
}
WORKFLOWS = {
    "rlvr": "single_turn", "livecodebench_single_turn": "single_turn", "actor_and_verify": "actor_verifier",
    "code_actor_and_verify_v2": "codegen_verifier", "alfworld_task_server": "agent_env", "webshop_task_server": "agent_env",
}  # fmt: skip
REWARDS = {"math_verify": "math", "livecodebench_reward": "code", "human_eval_reward": "code"}
EVALUATIONS = {"minerva": "minerva_math", "lcb_v5": "livecodebench_v5", "deepcoder_codeforces": "codeforces"}

M2PO = (
    Same("experiment.seed", "run.seed"),
    Same("experiment.model_path", "policies.*.model.path"),
    Same("experiment.dtype", "policies.*.trainer.compute_dtype"),
    Same("experiment.dtype", "inference.*.dtype"),
    Same("experiment.dtype", "policies.*.weights.publish_dtype"),
    Same("experiment.weight_transfer_strategies", "policies.*.weights.transfer"),
    Same("raas.delta_full_sync_interval", "policies.*.weights.full_every"),
    Same("dataflow.buffer.filter_function", "policies.*.batch.dynamic_sampling", {"filter_zero_adv": True}),
    Same("dataflow.buffer.max_staleness", "policies.*.batch.max_staleness"),
    Same("dataflow.buffer.replay_ratio", "policies.*.batch.replay.ratio", number),
    Same("dataflow.buffer.replay_size", "policies.*.batch.replay.capacity"),
    Same("dataflow.rollout_dataset.dataset_fn", "data.train.name", DATASETS, "math"),
    Same("dataflow.rollout_dataset.dataset_fn", "data.train.name", DATASETS, "code"),
    Same("dataflow.rollout_dataset.path", "data.train.name", DATASETS),
    Same("dataflow.rollout_dataset.dataset_name", catalogue("", "hub")),
    Same("dataflow.rollout_dataset.subset", catalogue("", "subset")),
    Same("dataflow.rollout_dataset.split", catalogue("", "split"), of="code"),
    Same("dataflow.rollout_dataset.max_length", "data.train.max_prompt_tokens", of="math"),
    Same("dataflow.rollout_dataset.max_length", "data.train.max_prompt_tokens", of="code"),
    Same("dataflow.workflow_spec.workflow_cls", "workflow.name", WORKFLOWS),
    Same("dataflow.workflow_spec.max_turns", "workflow.settings.max_turns"),
    Same("dataflow.{flow}.failure_penalty", "workflow.settings.failure_penalty"),
    Same("dataflow.{flow}.turn_discount", "workflow.settings.turn_discount"),
    Same("dataflow.workflow_spec.reward_fn", "workflow.settings.reward", REWARDS),
    Same("dataflow.workflow_spec.enable_thinking", "workflow.settings.thinking"),
    Same("dataflow.workflow_spec.enable_testgen_thinking", "workflow.settings.verifier_thinking"),
    Same("dataflow.workflow_spec.generated_case_count", "workflow.settings.num_cases"),
    Same("dataflow.workflow_spec.verify_timeout", "workflow.settings.case_time_s", number),
    Same("dataflow.workflow_spec.verify_timeout", "envgateway.sandbox.wall_time_s", number),
    Same("dataflow.workflow_spec.verify_timeout", "envgateway.sandbox.cpu_time_s", number),
    Same("dataflow.workflow_spec.discrete_testgen_reward", "workflow.settings.verifier_reward", {True: "coupled"}),
    Same("raas.models.{model}.backend", "inference.*.engine"),
    Same("raas.models.{model}.gconfig.n_samples", "rollout.group_size"),
    Same("{trainer}.n_samples", "rollout.group_size"),
    Same("raas.models.{model}.gconfig.temperature", "sampling.temperature"),
    *(
        Same(f"raas.models.{{model}}.gconfig.{key}", f"{where}.{key}")
        for key in ("max_new_tokens", "min_new_tokens", "top_p", "top_k")
        for where in ("sampling", "evaluation.samplings.sampled")
    ),
    Same("{trainer}.evaluator.eval_at_start", "evaluation.at_start"),
    Same("{trainer}.evaluator.freq_steps", "evaluation.every"),
    Same("dataflow.eval_datasets.{set}.repeat", "evaluation.samples_per_task"),
    *(
        Same(f"dataflow.eval_datasets.{name}.dataset_fn", f"data.evaluation.{EVALUATIONS.get(name, name)}.name", DATASETS)
        for name in ("aime24", "aime25", "amc", "math500", "minerva", "deepcoder_codeforces", "humaneval", "lcb_v5")
    ),
    *(
        Same(f"dataflow.eval_datasets.{name}.max_length", f"data.evaluation.{EVALUATIONS.get(name, name)}.max_prompt_tokens")
        for name in ("aime24", "aime25", "amc", "math500", "minerva", "deepcoder_codeforces", "humaneval", "lcb_v5")
    ),
    Same("dataflow.eval_datasets.valid.path", "data.evaluation.*.name", DATASETS),
    Same("dataflow.eval_datasets.lcb_v5.path", catalogue("livecodebench_v5", "local"),
         lambda value, recipe: value.removeprefix("./data-data/")),
    Same("dataflow.eval_datasets.deepcoder_codeforces.dataset_name", catalogue("codeforces", "hub")),
    Same("dataflow.eval_datasets.deepcoder_codeforces.subset", catalogue("codeforces", "subset")),
    Same("dataflow.eval_datasets.deepcoder_codeforces.split", catalogue("codeforces", "split")),
    Same("dataflow.eval_datasets.humaneval.split", catalogue("humaneval", "split")),
    Same("dataflow.eval_workflows.{flow}.gconfig_overrides.temperature", "evaluation.samplings.sampled.temperature"),
    Same("dataflow.eval_workflows.{flow}.max_turns", "workflow.settings.evaluation_max_turns"),
    Same("dataflow.eval_workflows.{flow}.workflow_cls", of_evaluation("name"), WORKFLOWS),
    Same("dataflow.eval_workflows.math_eval.enable_thinking", of_evaluation("thinking")),
    Same("dataflow.eval_workflows.{flow}.reward_fn", of_evaluation("reward"), REWARDS),
    Same("{trainer}.total_train_steps", "run.steps"),
    Same("{trainer}.train_batch_size", "policies.*.batch.size"),
    Same("{trainer}.actor.ppo_n_minibatches", "policies.*.batch.minibatches"),
    Same("{trainer}.actor.m2_threshold", "policies.*.algorithm.m2po_threshold"),
    Same("{trainer}.actor.adv_norm.{what}_level", "policies.*.algorithm.batch_normalize_advantages", {"batch": True}),
    Same("{trainer}.actor.reward_norm.{what}_level", "policies.*.algorithm.advantage", {"group": "grpo"}),
    Same("{trainer}.actor.reward_bias", "policies.*.algorithm.reward_bias", number),
    Same("{trainer}.actor.reward_scaling", "policies.*.algorithm.reward_scale", number),
    Same("{trainer}.actor.kl_ctl", "policies.*.algorithm.kl_reward_coefficient"),
    Same("{trainer}.actor.kl_penalty_coef", "policies.*.algorithm.kl_coefficient"),
    Same("{trainer}.actor.optimizer.lr", "policies.*.optimizer.lr", number),
    Same("{trainer}.actor.optimizer.beta1", "policies.*.optimizer.betas.0"),
    Same("{trainer}.actor.optimizer.beta2", "policies.*.optimizer.betas.1"),
    Same("{trainer}.actor.optimizer.eps", "policies.*.optimizer.eps", number),
    Same("{trainer}.actor.optimizer.weight_decay", "policies.*.optimizer.weight_decay"),
    Same("{trainer}.actor.optimizer.gradient_clipping", "policies.*.optimizer.max_grad_norm"),
    Same("{trainer}.actor.optimizer.lr_scheduler_type", "policies.*.optimizer.schedule"),
    Same("{trainer}.actor.optimizer.warmup_steps_proportion", "policies.*.optimizer.warmup_updates", {0.0: 0}),
    Same("{trainer}.engine.data_parallel_size", "policies.*.trainer.num_ranks"),
    Same("{trainer}.actor.gradient_checkpointing", "policies.*.trainer.gradient_checkpointing"),
    Same("{trainer}.{model}.mb_spec.max_tokens_per_mb", "policies.*.trainer.token_budget"),
    Same("{trainer}.recover.freq_steps", "policies.*.trainer.checkpoint_every"),
    Same("{trainer}.recover.mode", "run.resume"),
    Same("engine.backend", "inference.{service}.engine"),
    Same("engine.{model}.backend", "inference.{service}.engine"),
    Same("engine.data_parallel_size", engines("model0")),
    Same("engine.model0.data_parallel_size", engines("model0")),
    Same("engine.model1.data_parallel_size", engines("model1")),
    Same("sglang.context_length", "policies.*.model.context_length"),
    Same("sglang.max_running_requests", "inference.{service}.sglang.max_running_requests"),
    Same("sglang.mem_fraction_static", "inference.{service}.sglang.memory_share"),
    Same("rollout.max_concurrent_rollouts", "inference.{service}.num_slots",
         lambda value, recipe: value * recipe.rollout.group_size),
    Same("rollout.max_concurrent_evals", "evaluation.max_in_flight"),
)  # fmt: skip
RSTAR2 = (
    Same("actor.optim.lr", "policies.*.optimizer.lr", number),
    Same("actor.lr_sched.max_lr", "policies.*.optimizer.lr", number),
    Same("actor.optim.adam_beta1", "policies.*.optimizer.betas.0"),
    Same("actor.optim.adam_beta2", "policies.*.optimizer.betas.1"),
    Same("actor.optim.adam_eps", "policies.*.optimizer.eps"),
    Same("actor.optim.clip_grad", "policies.*.optimizer.max_grad_norm"),
    Same("actor.optim.weight_decay", "policies.*.optimizer.weight_decay"),
    Same("actor.lr_sched.lr_decay_style", "policies.*.optimizer.schedule"),
    Same("actor.lr_sched.lr_warmup_fraction", "policies.*.optimizer.warmup_updates", lambda share, _: round(share * 200)),
    Same("actor.optim.bf16", "policies.*.trainer.compute_dtype", {True: "bfloat16"}),
    Same("actor.model.precision", "policies.*.trainer.compute_dtype", {"bf16": "bfloat16"}),
    Same("actor.model.recompute_granularity", "policies.*.trainer.gradient_checkpointing", {"full": True}),
    Same("{part}.seed", "run.seed"),
    Same("algorithm.n_minibatches", "policies.*.batch.minibatches"),
    Same("runner.save_interval", "policies.*.trainer.checkpoint_every"),
    Same("runner.resume_dir", "run.resume"),
    Same("runner.max_tokens_per_mbs", "policies.*.trainer.token_budget"),
    Same("algorithm.adv_type", "policies.*.algorithm.advantage"),
    Same("algorithm.normalize_advantages", "policies.*.algorithm.batch_normalize_advantages"),
    Same("algorithm.loss_type", "policies.*.algorithm.name", {"actor": "grpo"}),
    Same("algorithm.loss_agg_func", "policies.*.algorithm.loss_aggregation", {"token-mean": "token_mean"}),
    Same("algorithm.ratio_clip_eps", "policies.*.algorithm.eps_clip"),
    Same("algorithm.clip_ratio_low", "policies.*.algorithm.eps_clip"),
    Same("algorithm.clip_ratio_high", "policies.*.algorithm.eps_clip_higher"),
    Same("algorithm.clip_ratio_c", "policies.*.algorithm.c_clip"),
    Same("algorithm.kl_beta", "policies.*.algorithm.kl_coefficient"),
    Same("algorithm.kl_penalty_type", "policies.*.algorithm.kl_estimator", {"low_var_kl": "k3"}),
    Same("algorithm.entropy_bonus", "policies.*.algorithm.entropy_coefficient"),
    Same("reward.reward_scale", "policies.*.algorithm.reward_scale"),
    Same("algorithm.group_size", "rollout.group_size"),
    Same("algorithm.down_sampling.down_sampling_config.down_sample_to_n", "policies.*.batch.resample.keep"),
    Same("algorithm.down_sampling.down_sampling_config.reject_equal_reward", "policies.*.batch.dynamic_sampling"),
    Same("algorithm.early_stop_imp_ratio", "policies.*.algorithm.early_stop_ratio"),
    Same("rollout.model.model_path", "policies.*.model.path", hub_name),
    Same("rollout.rollout_backend", "inference.*.engine"),
    Same("rollout.tensor_parallel_size", "inference.*.sglang.tensor_parallel"),
    Same("rollout.max_running_requests", "inference.*.sglang.max_running_requests"),
    Same("rollout.gpu_memory_utilization", "inference.*.sglang.memory_share"),
    Same("cluster.num_nodes", lambda recipe, service: len(recipe.nodes())),
    Same("algorithm.sampling_params.temperature", "sampling.temperature"),
    Same("algorithm.sampling_params.top_k", "sampling.top_k", {-1: 0}),
    Same("algorithm.sampling_params.top_p", "sampling.top_p"),
    Same("algorithm.sampling_params.min_new_tokens", "sampling.min_new_tokens"),
    Same("algorithm.sampling_params.min_new_tokens", "evaluation.samplings.*.min_new_tokens"),
    Same("algorithm.sampling_params.max_new_tokens", "sampling.max_new_tokens", lambda sequence_less_prompt, _: 10_240 - 2048),
    Same("runner.seq_length", longest_sequence),
    Same("agentloop.max_assistant_turns", "workflow.settings.max_turns"),
    Same("agentloop.max_tool_response_length", "workflow.settings.max_tool_response_chars"),
    Same("agentloop.toolcall_parser", "workflow.settings.format", {"rstar2-qwen": "json"}),
    Same("data.max_prompt_length", "data.train.max_prompt_tokens"),
    Same("data.rollout_batch_size", "policies.*.batch.size", kept_rollouts),
    Same("data.shuffle", "data.train.shuffle"),
    Same("tools.codejudge.host_addr", "envgateway.host"),
)  # fmt: skip

# Keys that some recipes keep and others do not, with the README's reason there.
DEPART = (
    r"math-multi-agent/.* dataflow\.eval_datasets\.(aime24|aime25|amc)\.repeat",  # a set that has each problem four times
    r"alfworld/.* trainer\.ref\.mb_spec.*|webshop/.* trainer\.ref\.mb_spec.*",
    r"math-multi-agent/qwen3-8b-actor-verifier-m2po-delta-dapo-data engine\.model0\.data_parallel_size",
    r"math-multi-agent/qwen3-8b-actor-verifier-.* rollout\.max_concurrent_rollouts",
)


@pytest.fixture
def references(data_root: Path) -> dict[str, dict[str, dict[str, Any]]]:
    needs.check("settings of the references")
    read: dict[str, dict[str, dict[str, Any]]] = json.loads(
        (data_root / "reference_recipes" / "settings.json").read_text()
    )
    return read


def ours(name: str) -> str:
    """The recipe here of one there."""
    if name.startswith("rstar2/"):
        return f"rstar2/qwen2.5-{'1.5b' if '1.5b' in name else '7b'}-instruct-grpo-roc"
    return name


def here(same: Same, recipe: Recipe, settings: Mapping[str, Any], service: str) -> Any:
    """The value that all settings of the path have."""
    if not isinstance(same.here, str):
        return same.here(recipe, service)
    path, _, place = same.here.replace("{service}", service).rpartition(".")
    pattern = re.compile(re.escape(path if place.isdigit() else f"{path}.{place}").replace(r"\*", "[^.]+"))
    values = [
        settings[name][int(place)] if place.isdigit() else settings[name]
        for name in settings
        if pattern.fullmatch(name)
    ]
    assert values and all(value == values[0] for value in values), f"{same.here}: {values}"
    return values[0]


def complaints(name: str, files: Mapping[str, Mapping[str, Any]], recipe: Recipe) -> Iterator[str]:
    settings, table = resolved(recipe), RSTAR2 if name.startswith("rstar2/") else M2PO
    for same in table:
        pattern = re.compile(re.sub(r"\\{\w+\\}", "[^.]+(?:[.][^.]+)?", re.escape(same.key)))
        for file, keys in files.items():
            service = {"raas_a.yaml": "a", "raas_b.yaml": "b"}.get(file, "*")
            for key, there in keys.items():
                if not (pattern.fullmatch(key) and name.startswith(same.of)):
                    continue
                if any(re.fullmatch(departs, f"{name} {key}") for departs in DEPART):
                    continue
                wanted = same.convert(there, recipe) if callable(same.convert) else same.convert.get(there, there)
                found = here(same, recipe, settings, service)
                if json.dumps(found) != json.dumps(wanted):  # 1 is neither 1.0 nor true
                    yield f"{key}: {found!r} here, {wanted!r} there ({file})"


def test_every_key_with_a_counterpart_has_the_value_of_the_reference(
    references: dict[str, dict[str, dict[str, Any]]],
) -> None:
    assert sorted(map(ours, references)) == recipes()
    found = {name: list(complaints(name, files, load(ours(name)))) for name, files in references.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}

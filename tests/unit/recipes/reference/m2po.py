"""Rows of AstraFlow's M2PO recipes: ``experiment.yaml``, and the ``raas*.yaml`` of each inference service."""

from __future__ import annotations

from tests.unit.recipes.reference import reading
from tests.unit.recipes.reference.names import (
    AGENTS,
    ALFWORLD,
    CODE,
    CODE_BASELINE,
    CODERS,
    DAPO,
    DAPO_PAIR,
    DEEPSCALER,
    DELTA,
    M2PO,
    MATH,
    PAIRS,
    SOLVERS,
    TWO_NODES,
    UNFILTERED,
    UNFILTERED_DAPO_PAIR,
    UNFILTERED_DAPO_SOLVER,
    WEBSHOP,
    Recipes,
)
from tests.unit.recipes.reference.reading import number, renamed
from tests.unit.recipes.reference.table import EXPERIMENT, RAAS, Per, absent, departs, fixed, per, rows, same

QWEN25, QWEN3 = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B"
NO_CAPACITY = (
    "admission issues tasks only while fewer than (max_staleness + 1) batches are waiting or running, which is less than "
    "this; only sequences that are too old are dropped"
)
TRACKER = (
    "`run.trackers` adds W&B (docs/trackers.md), which no recipe names: it needs an account. Metrics are written to "
    "`RUN/metrics/*.jsonl` and, as TensorBoard event files, to `RUN/tensorboard`; runs are told apart by the name of their directory"
)
SLOTS = (
    "its services adapt their load; a service here has a fixed number of slots (`inference.<name>.num_slots`), and an engine "
    "a queue"
)
NAMES = "a run is named by its recipe and the time, or by `run.id`"
ONE_EVALUATION = "links two sections of its file; one workflow evaluates all data sets here"
NO_PROMPT = "rows are places in a list of games or goals: there is no prompt to measure before the episode begins"
BUILT_IN_WORLD = (
    "the gateway plays the world itself, so a run is one command; `envgateway.agentbench` names a task server instead"
)


def tags(*entries: tuple[Recipes, str]) -> Per:
    """The tags of the tracker, as words."""
    return per(*((names, words.split()) for names, words in entries))


def one(name: str) -> Recipes:
    return frozenset({name})


def math_tags(*, first: bool) -> list[tuple[Recipes, str]]:
    start = "m2po math astraflow-v2 qwen3-8b tcp delta ctx16k mnt4k"
    found = []
    for name in sorted(MATH if first else PAIRS):
        kind = f"2agent {'solver' if first else 'verifier'} examples sglang-d2 fsdp-d2"
        kind = kind if name in PAIRS else "1agent examples sglang-d4 fsdp-d4"
        data = f"{' no-filter' if name in UNFILTERED else ''}{' dapo_filter' if name in DAPO else ''}"
        found.append((one(name), f"{start} {kind}{data}"))
    return found


def agent_tags() -> list[tuple[Recipes, str]]:
    end = "astraflow-v2 qwen2.5-7b-instruct tcp"
    return [
        (
            one(name),
            f"m2po {name.partition('/')[0]} {end} {name.rpartition('-')[2]} examples sglang-d4 fsdp-d4",
        )
        for name in sorted(AGENTS)
    ]


CODE_TAGS = "m2po code deepcoder-preview primeintellect"
SINGLE_TURN_TAGS = f"{CODE_TAGS} single-turn astraflow-v2"

RUN = rows(
    EXPERIMENT, M2PO,
    same("experiment.seed", 1, "run.seed"),
    same("experiment.model_path", per((AGENTS, QWEN25), (MATH | CODE, QWEN3)), "policies.*.model.path"),
    fixed("the model's directory holds its tokenizer", {
        "experiment.tokenizer_path": per((AGENTS, QWEN25), (MATH | CODE, QWEN3)),
    }),
    same("experiment.dtype", "bfloat16", "policies.*.trainer.compute_dtype"),
    same("experiment.dtype", "bfloat16", "inference.*.dtype", aspect="engines"),
    same("experiment.dtype", "bfloat16", "policies.*.weights.publish_dtype", aspect="published weights"),
    departs(
        "experiment.dtype", "bfloat16", "policies.*.trainer.master_dtype", "float32",
        "small updates are lost in bfloat16; on two GPUs float32 fits with AdamW's moments in host memory",
        aspect="master weights",
    ),
    absent(NAMES, {
        "experiment.experiment_name": per(
            (ALFWORLD, "astraflow-alfworld"), (WEBSHOP, "astraflow-webshop"), (MATH, "astraflow-math-multi-agent"),
            (CODERS, "astraflow-code"), (TWO_NODES | CODE_BASELINE, "code-multi-agent"),
        ),
        "experiment.trial_name": per(*((one(name), name.partition("/")[2]) for name in sorted(M2PO))),
    }),
    departs(
        "experiment.fileroot", "./data-experiments/${experiment.experiment_name}/${experiment.trial_name}", "run.dir", "runs",
        "every run has its own directory there",
    ),
    absent("the run's journal holds every trajectory; `rollmill trajectories` prints them", {
        "dataflow.dump_dir":
            "./data-experiments/${experiment.experiment_name}/${experiment.trial_name}/rollout_dumps",
    }, of=MATH | TWO_NODES | CODE_BASELINE),
    fixed("the ways to fetch a version are mapped files, ZeroMQ and gRPC, the last two over TCP", {
        "experiment.weight_transfer_mode": "tcp",
    }),
    same(
        "experiment.weight_transfer_strategies", per((DELTA, "delta"), (M2PO - DELTA, "full")), "policies.*.weights.transfer",
    ),
    same("raas.delta_full_sync_interval", 10, "policies.*.weights.full_every", of=DELTA),
    departs(
        "dataflow.host", "0.0.0.0", "orchestrator.host", "127.0.0.1",
        "a run on one node is reached from that node only; a run over two nodes gets the address of node 0, and TLS",
    ),
    departs("dataflow.port", 8000, "orchestrator.port", 50050, "gRPC instead of HTTP; `ORCHESTRATOR_PORT` sets it"),
)  # fmt: skip

BUFFER = rows(
    EXPERIMENT, M2PO,
    same(
        "dataflow.buffer.filter_function", "filter_zero_adv", "policies.*.batch.dynamic_sampling",
        renamed({"filter_zero_adv": True}), of=M2PO - UNFILTERED,
    ),
    same("dataflow.buffer.max_staleness", 8, "policies.*.batch.max_staleness"),
    same("dataflow.buffer.replay_ratio", 0, "policies.*.batch.replay.ratio", number),
    same(
        "dataflow.buffer.replay_size", per((AGENTS, 262_144), (MATH | CODE, 10_000)), "policies.*.batch.replay.capacity",
    ),
    absent(NO_CAPACITY, {"dataflow.buffer.size": per((AGENTS, 262_144), (MATH | CODE, 10_000))}),
)  # fmt: skip

TRAINING_DATA = rows(
    EXPERIMENT, M2PO,
    same(
        "dataflow.rollout_dataset.dataset_fn",
        per(
            (CODE, "astraflow.dataflow.dataset.deepcoder_preview:get_deepcoder_preview_primeintellect_rl_dataset"),
            (DAPO, "astraflow.dataflow.dataset.dapo_filter:get_dapo_filter_rl_dataset"),
            (DEEPSCALER, "astraflow.dataflow.dataset.deepscaler:get_deepscaler_rl_dataset"),
        ),
        "data.train.name", renamed(reading.DATASETS),
    ),
    fixed("rows are read by the name of the data set", {
        "dataflow.rollout_dataset.dataset_fn": per(
            (ALFWORLD, "astraflow.dataflow.dataset.alfworld:get_alfworld_rl_dataset"),
            (WEBSHOP, "astraflow.dataflow.dataset.webshop:get_webshop_rl_dataset"),
        ),
    }),
    same(
        "dataflow.rollout_dataset.path",
        per(
            (ALFWORLD, "astraEnv/AgentBench/data/alfworld/train_indices.jsonl"),
            (WEBSHOP, "astraEnv/AgentBench/data/webshop/train_indices.jsonl"),
        ),
        "data.train.name", renamed(reading.INDICES),
    ),
    same("dataflow.rollout_dataset.dataset_name", "agentica-org/DeepCoder-Preview-Dataset", reading.training("hub"), of=CODE),
    same("dataflow.rollout_dataset.subset", "primeintellect", reading.training("subset"), of=CODE),
    same("dataflow.rollout_dataset.split", "train", reading.training("split"), of=CODE),
    fixed("each split is a data set of its own name", {
        "dataflow.rollout_dataset.split": per((AGENTS, "train")),
        "dataflow.eval_datasets.valid.split": per((AGENTS, "test")),
    }),
    same(
        "dataflow.rollout_dataset.max_length", per((MATH, 2000), (CODE, 6000)), "data.train.max_prompt_tokens",
    ),
    departs(
        "dataflow.rollout_dataset.max_length", 4096, "data.train.max_prompt_tokens", None,
        NO_PROMPT, of=AGENTS,
    ),
    absent("tasks are drawn one by one, as fast as admission allows", {"dataflow.rollout_dataset.batch_size": 1}, of=MATH),
)  # fmt: skip

ROLLOUTS = rows(
    EXPERIMENT, M2PO,
    same(
        "dataflow.workflow_spec.workflow_cls",
        per(
            (ALFWORLD, "alfworld_task_server"), (WEBSHOP, "webshop_task_server"), (SOLVERS, "rlvr"),
            (PAIRS, "actor_and_verify"), (CODERS | CODE_BASELINE, "livecodebench_single_turn"),
            (TWO_NODES, "code_actor_and_verify_v2"),
        ),
        "workflow.name", renamed(reading.WORKFLOWS),
    ),
    same(
        "dataflow.workflow_spec.workflow_cls",
        per((ALFWORLD, "alfworld_task_server"), (WEBSHOP, "webshop_task_server")),
        "workflow.settings.environment", lambda value, recipe: value.partition("_")[0], aspect="environment",
    ),
    same("dataflow.workflow_spec.max_turns", per((ALFWORLD, 15), (WEBSHOP, 10)), "workflow.settings.max_turns"),
    same("dataflow.workflow_spec.failure_penalty", 0.0, "workflow.settings.failure_penalty", of=AGENTS),
    same("dataflow.workflow_spec.turn_discount", 1.0, "workflow.settings.turn_discount", of=AGENTS),
    absent(BUILT_IN_WORLD, {
        "dataflow.workflow_spec.task_server_url": "http://127.0.0.1:5000",
        "dataflow.eval_workflows.alfworld_eval.task_server_url": per((ALFWORLD, "http://127.0.0.1:5000")),
        "dataflow.eval_workflows.webshop_eval.task_server_url": per((WEBSHOP, "http://127.0.0.1:5000")),
    }, of=AGENTS),
    *(
        departs(
            key, 300.0, reading.environment_deadline_s, 60.0,
            "a stalled world is noticed within a minute; the call is then repeated or the episode played again",
            of=names,
        )
        for key, names in (
            ("dataflow.workflow_spec.timeout", AGENTS),
            ("dataflow.eval_workflows.alfworld_eval.timeout", ALFWORLD),
            ("dataflow.eval_workflows.webshop_eval.timeout", WEBSHOP),
        )
    ),
    absent("metrics of training and evaluation have names of their own", {
        "dataflow.workflow_spec.rollout_stat_scope": "rollout",
        "dataflow.eval_workflows.alfworld_eval.rollout_stat_scope": per((ALFWORLD, "eval-rollout")),
        "dataflow.eval_workflows.webshop_eval.rollout_stat_scope": per((WEBSHOP, "eval-rollout")),
    }, of=AGENTS),
    same(
        "dataflow.workflow_spec.reward_fn", per((MATH, "math_verify"), (CODE, "livecodebench_reward")),
        "workflow.settings.reward", renamed(reading.REWARDS),
    ),
    same("dataflow.workflow_spec.enable_thinking", False, "workflow.settings.thinking", of=MATH | TWO_NODES),
    same("dataflow.workflow_spec.enable_testgen_thinking", True, "workflow.settings.verifier_thinking", of=TWO_NODES),
    same("dataflow.workflow_spec.generated_case_count", 2, "workflow.settings.num_cases", of=TWO_NODES),
    same("dataflow.workflow_spec.verify_timeout", 6, "workflow.settings.case_time_s", number, of=TWO_NODES),
    *(
        same("dataflow.workflow_spec.verify_timeout", 6, path, number, of=TWO_NODES, aspect=aspect)
        for path, aspect in (
            ("envgateway.sandbox.wall_time_s", "sandbox"), ("envgateway.sandbox.cpu_time_s", "CPU time of the sandbox"),
        )
    ),
    fixed("a program earns 1 when it passes every test, else 0", {"dataflow.workflow_spec.discrete_code_reward": True}, TWO_NODES),
    same(
        "dataflow.workflow_spec.discrete_testgen_reward", True, "workflow.settings.verifier_reward",
        renamed({True: "coupled"}), of=TWO_NODES,
    ),
    fixed("examples are left out of what the verifier reads", {"dataflow.workflow_spec.strip_examples_for_testgen": True}, TWO_NODES),
)  # fmt: skip

SAMPLING = rows(
    EXPERIMENT, M2PO,
    same("raas.models.{model}.backend", "sglang", "inference.*.engine"),
    same("raas.models.{model}.gconfig.n_samples", 8, "rollout.group_size"),
    same("{trainer}.n_samples", 8, "rollout.group_size"),
    same("raas.models.{model}.gconfig.temperature", 1.0, "sampling.temperature"),
    same("raas.models.{model}.gconfig.max_new_tokens", per((AGENTS, 512), (MATH | CODE, 4096)), "sampling.max_new_tokens"),
    same("raas.models.{model}.gconfig.min_new_tokens", 0, "sampling.min_new_tokens"),
    same("raas.models.{model}.gconfig.top_p", 0.95, "sampling.top_p", of=AGENTS),
    same("raas.models.{model}.gconfig.top_k", 50, "sampling.top_k", of=AGENTS),
    *(
        same(
            f"raas.models.{{model}}.gconfig.{key}", value, f"evaluation.samplings.sampled.{key}", of=names,
            aspect="evaluation",
        )
        for key, value, names in (
            ("max_new_tokens", 512, AGENTS), ("max_new_tokens", 4096, MATH | CODE), ("min_new_tokens", 0, M2PO),
            ("top_p", 0.95, AGENTS), ("top_k", 50, AGENTS),
        )
    ),
)  # fmt: skip

EVALUATION = rows(
    EXPERIMENT, M2PO,
    same("{trainer}.evaluator.eval_at_start", False, "evaluation.at_start"),
    same("{trainer}.evaluator.freq_steps", per((AGENTS, 10), (MATH | CODE, 25)), "evaluation.every"),
    same("dataflow.eval_datasets.{evaluation}.repeat", per((AGENTS, 4), (CODE, 2)), "evaluation.samples_per_task"),
    *(
        same(f"dataflow.eval_datasets.{name}.repeat", 4, "evaluation.samples_per_task", of=MATH)
        for name in ("minerva", "math500")
    ),
    *(
        same(
            f"dataflow.eval_datasets.{name}.repeat", 4, f"data.evaluation.{name}.samples_per_task", reading.four_times,
            of=MATH,
        )
        for name in ("aime24", "aime25", "amc")
    ),
    *(
        same(
            f"dataflow.eval_datasets.{name}.dataset_fn", f"astraflow.dataflow.dataset.{function}",
            f"data.evaluation.{ours}.name", renamed(reading.DATASETS), of=names,
        )
        for names, name, ours, function in (
            (MATH, "aime24", "aime24", "aime24x4:get_aime_2024x4_test_dataset"),
            (MATH, "aime25", "aime25", "aime25x4:get_aime_2025x4_test_dataset"),
            (MATH, "amc", "amc", "amc24:get_amc_2024x4_test_dataset"),
            (MATH, "math500", "math500", "math500:get_math500_test_dataset"),
            (MATH, "minerva", "minerva_math", "minervamath:get_minerva_math_test_dataset"),
            (CODE, "deepcoder_codeforces", "codeforces", "deepcoder_preview:get_deepcoder_preview_codeforces_test_dataset"),
            (CODE, "humaneval", "humaneval", "human_eval:get_human_eval_test_dataset"),
            (CODE, "lcb_v5", "livecodebench_v5", "livecodebench:get_livecodebench_single_turn_test_dataset"),
        )
    ),
    fixed("rows are read by the name of the data set", {
        "dataflow.eval_datasets.valid.dataset_fn": per(
            (ALFWORLD, "astraflow.dataflow.dataset.alfworld:get_alfworld_rl_dataset"),
            (WEBSHOP, "astraflow.dataflow.dataset.webshop:get_webshop_rl_dataset"),
        ),
    }),
    same(
        "dataflow.eval_datasets.valid.path",
        per(
            (ALFWORLD, "astraEnv/AgentBench/data/alfworld/valid_indices.jsonl"),
            (WEBSHOP, "astraEnv/AgentBench/data/webshop/valid_indices.jsonl"),
        ),
        "data.evaluation.*.name", renamed(reading.INDICES),
    ),
    same(
        "dataflow.eval_datasets.lcb_v5.path", "./data-data/AReaL-boba-2-RL-Code/code_benchmark/lcb_v5/test.jsonl",
        reading.evaluation("livecodebench_v5", "local"), reading.below_the_data_root, of=CODE,
    ),
    departs(
        "dataflow.eval_datasets.humaneval.path", "./astraEnv/human-eval/data/HumanEval.jsonl",
        reading.evaluation("humaneval", "local"), "humaneval/HumanEval.jsonl", "below ROLLMILL_DATA_ROOT, else fetched from the hub",
        of=CODE,
    ),
    same(
        "dataflow.eval_datasets.deepcoder_codeforces.dataset_name", "agentica-org/DeepCoder-Preview-Dataset",
        reading.evaluation("codeforces", "hub"), of=CODE,
    ),
    same("dataflow.eval_datasets.deepcoder_codeforces.subset", "codeforces", reading.evaluation("codeforces", "subset"), of=CODE),
    same("dataflow.eval_datasets.deepcoder_codeforces.split", "test", reading.evaluation("codeforces", "split"), of=CODE),
    same("dataflow.eval_datasets.humaneval.split", "test", reading.evaluation("humaneval", "split"), of=CODE),
    fixed("a file of one split", {"dataflow.eval_datasets.lcb_v5.split": "test"}, of=CODE),
    same(
        "dataflow.eval_datasets.{evaluation}.max_length", per((MATH, 2000), (CODE, 6000)),
        "data.evaluation.{evaluation}.max_prompt_tokens",
    ),
    departs(
        "dataflow.eval_datasets.valid.max_length", 4096, "data.evaluation.*.max_prompt_tokens", None, NO_PROMPT, of=AGENTS,
    ),
    absent(ONE_EVALUATION, {
        "dataflow.eval_datasets.deepcoder_codeforces.eval_workflow": per((CODE, "code_eval")),
        "dataflow.eval_datasets.humaneval.eval_workflow": per((CODE, "humaneval_eval")),
        "dataflow.eval_datasets.lcb_v5.eval_workflow": per((CODE, "code_eval")),
        "dataflow.eval_datasets.{evaluation}.eval_workflow": per((MATH, "math_eval")),
        "dataflow.eval_datasets.valid.eval_workflow": per((ALFWORLD, "alfworld_eval"), (WEBSHOP, "webshop_eval")),
    }),
    *(
        [
            *fixed("every repeat is one sample", {f"dataflow.eval_workflows.{workflow}.gconfig_overrides.n_samples": 1}, names),
            same(
                f"dataflow.eval_workflows.{workflow}.gconfig_overrides.temperature", 0.6,
                "evaluation.samplings.sampled.temperature", of=names,
            ),
        ]
        for workflow, names in (
            ("alfworld_eval", ALFWORLD), ("webshop_eval", WEBSHOP), ("math_eval", MATH), ("code_eval", CODE),
            ("humaneval_eval", CODE),
        )
    ),
    *(
        row
        for workflow, names in (("alfworld_eval", ALFWORLD), ("webshop_eval", WEBSHOP))
        for row in (
            same(f"dataflow.eval_workflows.{workflow}.max_turns", 10, "workflow.settings.evaluation_max_turns", of=names),
            same(f"dataflow.eval_workflows.{workflow}.failure_penalty", 0.0, "workflow.settings.failure_penalty", of=names),
            same(f"dataflow.eval_workflows.{workflow}.turn_discount", 1.0, "workflow.settings.turn_discount", of=names),
            same(
                f"dataflow.eval_workflows.{workflow}.workflow_cls", f"{workflow.partition('_')[0]}_task_server",
                reading.evaluation_workflow, renamed(reading.WORKFLOWS), of=names,
            ),
        )
    ),
    same(
        "dataflow.eval_workflows.math_eval.workflow_cls", per((PAIRS, "actor_and_verify"), (SOLVERS, "rlvr")),
        reading.evaluation_workflow, renamed(reading.WORKFLOWS),
    ),
    same("dataflow.eval_workflows.math_eval.enable_thinking", False, reading.evaluation_thinking, of=MATH),
    same("dataflow.eval_workflows.math_eval.reward_fn", "math_verify", reading.evaluation_reward, renamed(reading.REWARDS), of=MATH),
    *(
        row
        for workflow, reward in (("code_eval", "livecodebench_reward"), ("humaneval_eval", "human_eval_reward"))
        for row in (
            same(
                f"dataflow.eval_workflows.{workflow}.workflow_cls", "livecodebench_single_turn",
                reading.evaluation_workflow, renamed(reading.WORKFLOWS), of=CODE,
            ),
            same(
                f"dataflow.eval_workflows.{workflow}.reward_fn", reward, reading.evaluation_reward,
                renamed(reading.REWARDS), of=CODE,
            ),
        )
    ),
)  # fmt: skip

TRAINING = rows(
    EXPERIMENT, M2PO,
    same(
        "{trainer}.total_train_steps", per((AGENTS | MATH | CODERS, 1200), (CODE_BASELINE, 1500), (TWO_NODES, 800)), "run.steps"
    ),
    same(
        "{trainer}.train_batch_size",
        per((ALFWORLD | CODERS, 128), (WEBSHOP | MATH | CODE_BASELINE | TWO_NODES, 256)), "policies.*.batch.size",
    ),
    same("{trainer}.actor.ppo_n_minibatches", per((CODERS, 2), (M2PO - CODERS, 4)), "policies.*.batch.minibatches"),
    same("{trainer}.actor.m2_threshold", per((AGENTS, 0.004), (MATH | CODE, 0.01)), "policies.*.algorithm.m2po_threshold"),
    fixed("M2PO's trust region replaces the clip; only its caps, 0.95 down and 20 up, stay", {
        "{trainer}.actor.eps_clip": 100.0,
        "{trainer}.actor.eps_clip_higher": 100.0,
    }),
    same(
        "{trainer}.actor.adv_norm.mean_level", "batch", "policies.*.algorithm.batch_normalize_advantages",
        renamed({"batch": True}),
    ),
    same(
        "{trainer}.actor.adv_norm.std_level", "batch", "policies.*.algorithm.batch_normalize_advantages",
        renamed({"batch": True}),
    ),
    same("{trainer}.actor.reward_norm.mean_level", "group", "policies.*.algorithm.advantage", renamed({"group": "grpo"})),
    same("{trainer}.actor.reward_norm.std_level", "group", "policies.*.algorithm.advantage", renamed({"group": "grpo"})),
    same("{trainer}.actor.reward_bias", 0, "policies.*.algorithm.reward_bias", number),
    same("{trainer}.actor.reward_scaling", 1, "policies.*.algorithm.reward_scale", number),
    same("{trainer}.actor.kl_ctl", 0.0, "policies.*.algorithm.kl_reward_coefficient"),
    same("{trainer}.actor.kl_penalty_coef", 0.001, "policies.*.algorithm.kl_coefficient"),
    fixed("M2PO takes the log-probabilities of the engine that sampled", {"{trainer}.actor.recompute_logprob": False}, of=MATH),
    same(
        "{trainer}.actor.optimizer.lr", per((AGENTS, "1e-6"), (CODE, "3e-6"), (MATH, "5e-6")), "policies.*.optimizer.lr",
        number,
    ),
    same("{trainer}.actor.optimizer.beta1", 0.9, "policies.*.optimizer.betas.0"),
    same("{trainer}.actor.optimizer.beta2", 0.999, "policies.*.optimizer.betas.1"),
    same("{trainer}.actor.optimizer.eps", "1e-8", "policies.*.optimizer.eps", number),
    same("{trainer}.actor.optimizer.weight_decay", 0.01, "policies.*.optimizer.weight_decay"),
    same("{trainer}.actor.optimizer.gradient_clipping", 1.0, "policies.*.optimizer.max_grad_norm"),
    same("{trainer}.actor.optimizer.lr_scheduler_type", "constant", "policies.*.optimizer.schedule"),
    same(
        "{trainer}.actor.optimizer.warmup_steps_proportion", 0.0, "policies.*.optimizer.warmup_updates",
        reading.share_of_updates(1), of=MATH,
    ),
    fixed("AdamW is the optimizer there is", {"{trainer}.actor.optimizer.type": "adam"}),
    fixed("FSDP2 is what several ranks share the training with", {"{trainer}.engine.backend": "fsdp"}),
    same(
        "{trainer}.engine.data_parallel_size", per((PAIRS | TWO_NODES, 2), (M2PO - PAIRS - TWO_NODES, 4)),
        "policies.*.trainer.num_ranks",
    ),
    same("{trainer}.actor.gradient_checkpointing", True, "policies.*.trainer.gradient_checkpointing"),
    absent("sequences are packed end to end: there is no padding", {"{trainer}.actor.pad_to_maximum": True}, of=AGENTS),
    same(
        "{trainer}.actor.mb_spec.max_tokens_per_mb",
        per((AGENTS, 20_384), (MATH, 17_408), (CODE - TWO_NODES, 22_000), (TWO_NODES, 14_000)),
        "policies.*.trainer.token_budget",
    ),
    same(
        "{trainer}.ref.mb_spec.max_tokens_per_mb", per((MATH, 17_408), (CODE - TWO_NODES, 22_000), (TWO_NODES, 14_000)),
        "policies.*.trainer.token_budget",
    ),
    departs(
        "{trainer}.ref.mb_spec.max_tokens_per_mb", 17_408, "policies.*.trainer.token_budget", 20_384,
        "policy and reference model see the same micro-batches; the budget never changes a result", of=AGENTS,
    ),
    same(
        "{trainer}.recover.freq_steps", per((MATH, 26), (TWO_NODES, 23), (M2PO - MATH - TWO_NODES, 25)),
        "policies.*.trainer.checkpoint_every",
    ),
    same("{trainer}.recover.mode", "auto", "run.resume"),
    same(
        "trainer.model_id", per((AGENTS, "default"), (CODE_BASELINE, "model0")), reading.policy("model0"),
        renamed({"default": "model0"}),
    ),
    same("trainer_model0.model_id", "model0", reading.policy("model0"), of=MATH | CODE - CODE_BASELINE),
    same("trainer_model1.model_id", "model1", reading.policy("model1"), of=PAIRS | TWO_NODES),
    absent(TRACKER, {
        "{trainer}.stats_logger.wandb.mode": "online",
        "{trainer}.stats_logger.wandb.id_suffix": "uid",
    }),
    absent(TRACKER, {
        "trainer.stats_logger.wandb.tags": tags(
            *agent_tags(), (CODE_BASELINE, f"{SINGLE_TURN_TAGS} q3-8b tcp full single-agent"),
        ),
        "trainer_model0.stats_logger.wandb.tags": tags(
            *math_tags(first=True),
            (TWO_NODES, f"{CODE_TAGS} astraflow-v2 q3-8b tcp full codegen-verifier codegen 2node mraas"),
            *(
                (one(name), f"{SINGLE_TURN_TAGS} qwen3-8b tcp {name.rpartition('-')[2]} examples sglang-d4 fsdp-d4")
                for name in sorted(CODERS)
            ),
        ),
        "trainer_model1.stats_logger.wandb.tags": tags(
            *math_tags(first=False),
            (TWO_NODES, f"{CODE_TAGS} astraflow-v2 q3-8b tcp full codegen-verifier testgen 2node mraas"),
        ),
    }),
)  # fmt: skip

ENGINES = rows(
    RAAS, M2PO,
    same("engine.backend", "sglang", "inference.{service}.engine", of=AGENTS),
    same("engine.data_parallel_size", 4, reading.engines("model0"), of=AGENTS),
    same("engine.{model}.backend", "sglang", "inference.{service}.engine", of=(MATH | CODE) - DAPO_PAIR),
    same("engine.model0.backend", "sglang", "inference.{service}.engine", of=DAPO_PAIR),
    same(
        "engine.model0.data_parallel_size", per((SOLVERS | CODE - TWO_NODES, 4), (PAIRS - DAPO_PAIR, 2)),
        reading.engines("model0"),
    ),
    departs(
        "engine.model0.data_parallel_size", 4, reading.engines("model0"), 2,
        "there no engine serves model1, so the recipe cannot start; a recipe here is validated as a whole, and each policy "
        "has two engines as in the other pairs", of=DAPO_PAIR,
    ),
    same("engine.model1.data_parallel_size", 2, reading.engines("model1"), of=PAIRS - DAPO_PAIR),
    same("sglang.context_length", per((AGENTS | MATH, 16_384), (CODE, 12_288)), "policies.*.model.context_length"),
    same(
        "sglang.max_running_requests",
        per((WEBSHOP | DAPO - UNFILTERED_DAPO_PAIR, None), (UNFILTERED_DAPO_PAIR, 256), (ALFWORLD | CODE | DEEPSCALER, 48)),
        "inference.{service}.sglang.max_running_requests",
    ),
    same(
        "sglang.mem_fraction_static",
        per((ALFWORLD, 0.7), (WEBSHOP | UNFILTERED_DAPO_PAIR, 0.6), ((MATH | CODE) - UNFILTERED_DAPO_PAIR, 0.8)),
        "inference.{service}.sglang.memory_share",
    ),
    absent("SGLang's default for the GPU, which is this one on Hopper; `inference.<name>.sglang.extra_arguments` sets another", {
        "sglang.attention_backend": "fa3",
    }, of=AGENTS),
    fixed("engines take and give tokens, never text", {"sglang.skip_tokenizer_init": True}, of=MATH | CODE),
    absent("engines take and give tokens, never text: what is trained is what was sampled", {
        "sglang.skip_tokenizer_init": False,
    }, of=AGENTS),
    same(
        "rollout.max_concurrent_rollouts", per((DAPO - PAIRS, 1024), (M2PO - DAPO - PAIRS, 256)),
        "inference.{service}.num_slots", reading.tasks_as_rollouts,
    ),
    departs(
        "rollout.max_concurrent_rollouts", per((DAPO & PAIRS, 1024), (PAIRS - DAPO, 256)), reading.tasks_at_once,
        per((DAPO & PAIRS, 2048), (PAIRS - DAPO, 512)),
        "each of the two services has as many, because an evaluation takes one service for itself; admission bounds the sum",
    ),
    same("rollout.max_concurrent_evals", 64, "evaluation.max_in_flight", of=UNFILTERED_DAPO_SOLVER),
    absent(SLOTS, {
        "rollout.adaptive_step_size": 4,
        "rollout.enable_adaptive_availability": True,
        "rollout.load_cache_ttl_ms": 100,
        "rollout.pause_grace_period": 3,
        "rollout.target_waiting_queue_per_dp": per((CODERS, 16), (M2PO - CODERS, 4)),
    }),
    absent(SLOTS, {"rollout.consumer_batch_size": 32}, of=MATH),
    absent("training rollouts go on during an evaluation", {"rollout.reset_training_on_eval": True}, of=AGENTS),
) + [
    row
    for file, model0, model1 in (("raas_a.yaml", 6, 2), ("raas_b.yaml", 3, 1))
    for row in rows(
        file, TWO_NODES,
        same("engine.model0.data_parallel_size", model0, reading.engines("model0")),
        same("engine.model1.data_parallel_size", model1, reading.engines("model1")),
    )
]  # fmt: skip

M2PO_ROWS = [*RUN, *BUFFER, *TRAINING_DATA, *ROLLOUTS, *SAMPLING, *EVALUATION, *TRAINING, *ENGINES]

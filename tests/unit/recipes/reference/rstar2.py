"""Rows of RLinf's rStar2 recipes: one hydra file each."""

from __future__ import annotations

from tests.unit.recipes.reference import reading
from tests.unit.recipes.reference.names import RSTAR2, RSTAR2_1_5B, RSTAR2_7B
from tests.unit.recipes.reference.reading import number, renamed
from tests.unit.recipes.reference.table import HYDRA, Text, absent, departs, fixed, per, rows, same

MODEL = "says how a Megatron model is built; the model's own `config.json` says what it is"
MEGATRON = "belongs to Megatron; the trainer here is FSDP2, which writes its own checkpoints and safetensors"
FSDP = "FSDP2 shares weights, gradients and moments over four ranks: a model of this size needs no tensor parallelism"
PROFILER = "recipes have no profiler: every process accounts for its time (docs/observability.md)"
SHARED_GPUS = "engines and trainer have GPUs of their own, so neither has to free memory for the other"
GROUPS = "names of groups of Ray workers; the services of a run are processes with names of their own"
PACKING = "micro-batches are packed up to `policies.<name>.trainer.token_budget`"
TOKENIZER = (
    "the tokenizer is the model's own, read without code of its folder; sequences are packed, so there is no padding"
)
PRINTS = "the journal holds every trajectory; `rollmill trajectories` prints them"
SAMPLED = "the gradient takes the log-probabilities of the engine that sampled; nothing is computed again"
RECOMPUTING = "belongs to the workers that recompute log-probabilities, which nothing does here"
VLLM = "belongs to vLLM, which is used neither there nor here"
KERNELS = "SGLang's default for the GPU; `inference.<name>.sglang.extra_arguments` sets another"
HYDRA_ITSELF = "belongs to hydra, which reads its files"
ONE_SCHEDULE = "has no effect with a constant schedule"

TRAINING = rows(
    HYDRA, RSTAR2,
    same("actor.optim.lr", "1e-6", "policies.*.optimizer.lr", number),
    same("actor.lr_sched.max_lr", "1e-6", "policies.*.optimizer.lr", number),
    same("actor.optim.adam_beta1", 0.9, "policies.*.optimizer.betas.0"),
    same("actor.optim.adam_beta2", 0.999, "policies.*.optimizer.betas.1"),
    same("actor.optim.adam_eps", 1e-8, "policies.*.optimizer.eps"),
    same("actor.optim.clip_grad", 1.0, "policies.*.optimizer.max_grad_norm"),
    same("actor.optim.weight_decay", 0.01, "policies.*.optimizer.weight_decay"),
    same("actor.lr_sched.lr_decay_style", "constant", "policies.*.optimizer.schedule"),
    same("actor.lr_sched.lr_warmup_fraction", 0.1, "policies.*.optimizer.warmup_updates", reading.share_of_updates(200)),
    absent(ONE_SCHEDULE, {
        "actor.lr_sched.lr_decay_iters": 200,
        "actor.lr_sched.min_lr": 0.0,
        "actor.optim.min_lr": 0.0,
    }),
    absent("the first update has 1 / (warmup_updates + 1) of the rate: an update at rate 0 would have no effect", {
        "actor.lr_sched.lr_warmup_init": 0.0,
    }),
    fixed("AdamW is the optimizer there is", {"actor.optim.optimizer": "adam"}),
    fixed("FSDP2 shards the moments of the optimizer", {"actor.optim.use_distributed_optimizer": True}),
    same("actor.optim.bf16", True, "policies.*.trainer.compute_dtype", renamed({True: "bfloat16"})),
    fixed("`policies.<name>.trainer.compute_dtype` names one type", {"actor.optim.fp16": False}),
    same("actor.model.precision", "bf16", "policies.*.trainer.compute_dtype", renamed({"bf16": "bfloat16"})),
    same(
        "rollout.model.precision", "${actor.model.precision}", "inference.*.dtype",
        renamed({"${actor.model.precision}": "bfloat16"}),
    ),
    same("actor.model.recompute_granularity", "full", "policies.*.trainer.gradient_checkpointing", renamed({"full": True})),
    absent("activations of every layer are recomputed", {
        "actor.model.recompute_method": "block",
        "actor.model.recompute_num_layers": 20,
    }),
    absent(FSDP, {
        "actor.model.tensor_model_parallel_size": per((RSTAR2_7B, 2), (RSTAR2_1_5B, 1)),
        "actor.model.sequence_parallel": per((RSTAR2_7B, True), (RSTAR2_1_5B, False)),
        "actor.model.pipeline_model_parallel_size": 1,
        "actor.training_backend": "megatron",
    }),
    absent(SHARED_GPUS, {"actor.offload_grad": True, "actor.offload_optimizer": True, "actor.offload_weight": True}),
    fixed("sequences are dealt so that ranks and minibatches have equal work", {"actor.enable_dp_load_balance": True}),
    same("actor.seed", 1234, "run.seed"),
    same("algorithm.n_minibatches", 1, "policies.*.batch.minibatches"),
    same("runner.save_interval", 10, "policies.*.trainer.checkpoint_every"),
    departs(
        "runner.max_steps", -1, "run.steps", 150, "no bound there; 150 is where its results are published",
    ),
    absent("a run is bounded by its steps", {"runner.max_epochs": 1000}),
    same("runner.resume_dir", "auto", "run.resume"),
    same("runner.max_tokens_per_mbs", 16_384, "policies.*.trainer.token_budget"),
    fixed(PACKING, {"runner.enable_dynamic_batch_size": True, "actor.model.variable_seq_lengths": True}),
    absent(PACKING, {
        "algorithm.logprob_forward_micro_batch_size": 1,
        "algorithm.training_batch_size_per_gpu": 1,
        "algorithm.rollout_batch_size_per_gpu": None,
        "algorithm.val_rollout_batch_size_per_gpu": 4,
        "data.val_rollout_batch_size": None,
    }),
    absent(MODEL, {
        "actor.mcore_gpt": True,
        "actor.spec_name": "decoder_gpt",
        "actor.model.activation": "swiglu",
        "actor.model.add_bias_linear": False,
        "actor.model.attention_softmax_in_fp32": True,
        "actor.model.apply_rope_fusion": True,
        "actor.model.batch_p2p_comm": False,
        "actor.model.bias_activation_fusion": False,
        "actor.model.bias_dropout_fusion": False,
        "actor.model.encoder_seq_length": "${runner.seq_length}",
        "actor.model.gradient_accumulation_fusion": False,
        "actor.model.megatron_checkpoint": None,
        "actor.model.moe_token_dispatcher_type": "alltoall",
        "actor.model.normalization": "rmsnorm",
        "actor.model.persist_layer_norm": False,
        "actor.model.position_embedding_type": "rope",
        "actor.model.seq_length": "${runner.seq_length}",
        "actor.model.use_cpu_initialization": False,
        "rollout.model.model_type": "qwen2.5",
        "inference.model_type": "${rollout.model.model_type}",
    }),
    absent(MEGATRON, {
        "actor.megatron.ckpt_convertor.hf_model_path": "${rollout.model.model_path}",
        "actor.megatron.ckpt_convertor.model": per((RSTAR2_7B, "Qwen2.5-7B"), (RSTAR2_1_5B, "Qwen2.5-1.5B")),
        "actor.megatron.ckpt_convertor.pipeline_model_parallel_size": "${actor.model.pipeline_model_parallel_size}",
        "actor.megatron.ckpt_convertor.process_num": 16,
        "actor.megatron.ckpt_convertor.save_path": "${runner.output_dir}/${runner.experiment_name}/converted_ckpts/actor",
        "actor.megatron.ckpt_convertor.tensor_model_parallel_size": "${actor.model.tensor_model_parallel_size}",
        "actor.megatron.ckpt_convertor.use_gpu_index": None,
        "actor.megatron.ckpt_convertor.use_gpu_num": 0,
        "actor.megatron.ckpt_format": "torch",
        "actor.megatron.ddp_bucket_size": None,
        "actor.megatron.distributed_backend": "nccl",
        "actor.megatron.distributed_timeout_minutes": 60,
        "actor.megatron.tp_comm_bootstrap_backend": "nccl",
        "actor.megatron.tp_comm_overlap_cfg": None,
        "actor.megatron.use_dist_ckpt": False,
        "actor.megatron.use_hf_ckpt": True,
        "actor.optim.optimizer_enable_pin": False,
        "actor.optim.overlap_grad_reduce": False,
        "actor.optim.overlap_param_gather": False,
        "actor.optim.overlap_param_gather_with_optimizer_step": False,
    }),
    absent(PROFILER, {
        "actor.calculate_flops": False,
        "actor.megatron.profiler.activities": ["cpu", "cuda"],
        "actor.megatron.profiler.chrome_filename_prefix": "chrome_trace",
        "actor.megatron.profiler.export_chrome_trace": False,
        "actor.megatron.profiler.export_tensorboard": True,
        "actor.megatron.profiler.output_dir": "${runner.output_dir}/${runner.experiment_name}/profiler",
        "actor.megatron.profiler.profile_memory": False,
        "actor.megatron.profiler.record_shapes": False,
        "actor.megatron.profiler.schedule_active": 1,
        "actor.megatron.profiler.schedule_repeat": 1,
        "actor.megatron.profiler.schedule_warmup": 2,
        "actor.megatron.profiler.with_flops": False,
        "actor.megatron.profiler.with_modules": True,
        "actor.megatron.profiler.with_stack": False,
        "actor.megatron.use_profiler": False,
    }),
    absent(TOKENIZER, {
        "actor.tokenizer.padding_side": "right",
        "actor.tokenizer.tokenizer_model": "${rollout.model.model_path}",
        "actor.tokenizer.trust_remote_code": True,
        "actor.tokenizer.use_fast": False,
        "reward.tokenizer.padding_side": "${actor.tokenizer.padding_side}",
        "reward.tokenizer.tokenizer_model": "${actor.tokenizer.tokenizer_model}",
        "reward.tokenizer.trust_remote_code": "${actor.tokenizer.trust_remote_code}",
        "reward.tokenizer.use_fast": "${actor.tokenizer.use_fast}",
        "rollout.padding": None,
        "rollout.eos": None,
    }),
)  # fmt: skip

ALGORITHM = rows(
    HYDRA, RSTAR2,
    same("algorithm.adv_type", "grpo", "policies.*.algorithm.advantage"),
    same("algorithm.normalize_advantages", False, "policies.*.algorithm.batch_normalize_advantages"),
    same("algorithm.loss_type", "actor", "policies.*.algorithm.name", renamed({"actor": "grpo"})),
    same("algorithm.loss_agg_func", "token-mean", "policies.*.algorithm.loss_aggregation", renamed({"token-mean": "token_mean"})),
    same("algorithm.ratio_clip_eps", 0.2, "policies.*.algorithm.eps_clip"),
    same("algorithm.clip_ratio_low", 0.2, "policies.*.algorithm.eps_clip"),
    same("algorithm.clip_ratio_high", 0.28, "policies.*.algorithm.eps_clip_higher"),
    same("algorithm.clip_ratio_c", 3.0, "policies.*.algorithm.c_clip"),
    fixed("log ratios are always clamped to these", {"algorithm.clip_log_ratio_max": 20, "algorithm.clip_log_ratio_min": -20}),
    same("algorithm.kl_beta", 0.0, "policies.*.algorithm.kl_coefficient"),
    same("algorithm.kl_penalty_type", "low_var_kl", "policies.*.algorithm.kl_estimator", renamed({"low_var_kl": "k3"})),
    same("algorithm.entropy_bonus", 0.0, "policies.*.algorithm.entropy_coefficient"),
    same("reward.reward_scale", 1.0, "policies.*.algorithm.reward_scale"),
    same("algorithm.group_size", 32, "rollout.group_size"),
    same("algorithm.down_sampling.do_down_sampling", True, reading.resamples),
    same(
        "algorithm.down_sampling.down_sampling_config.down_sample_to_n", 16, "policies.*.batch.resample.keep",
    ),
    same(
        "algorithm.down_sampling.down_sampling_config.reject_equal_reward", True, "policies.*.batch.dynamic_sampling",
    ),
    fixed("resampling keeps two of each kind while the group has two", {
        "algorithm.down_sampling.down_sampling_config.min_non_zero_reward_trace_num": 2,
        "algorithm.down_sampling.down_sampling_config.min_zero_reward_trace_num": 2,
    }),
    fixed("the penalty of a right answer is the share of failed tool calls plus the format term", {
        "algorithm.down_sampling.down_sampling_config.roc_answer_format": True,
        "algorithm.down_sampling.down_sampling_config.roc_error_ratio": True,
    }),
    same("algorithm.early_stop_imp_ratio", 5.0, "policies.*.algorithm.early_stop_ratio"),
    fixed(SAMPLED, {
        "algorithm.recompute_logprobs": False,
        "rollout.return_logprobs": "${not:${algorithm.recompute_logprobs}}",
    }),
    fixed("sequences stay with their groups until their advantages are stamped", {"algorithm.shuffle_rollout": False}),
    absent("the mean entropy is always a metric: it comes with the log-probabilities", {"algorithm.calculate_entropy": False}),
    fixed("a token weighs the same in every sequence", {"algorithm.use_valid_token_scale": False}),
    fixed("there is no critic", {"critic.use_critic_model": False}),
)  # fmt: skip

ROLLOUTS = rows(
    HYDRA, RSTAR2,
    same(
        "rollout.model.model_path",
        per(
            (RSTAR2_7B, "/path/to/model/Qwen2.5-7B-Instruct"), (RSTAR2_1_5B, "/path/to/model/Qwen2.5-1.5B-Instruct"),
        ),
        "policies.*.model.path", reading.model_on_the_hub,
    ),
    same("rollout.rollout_backend", "sglang", "inference.*.engine"),
    same("rollout.tensor_parallel_size", per((RSTAR2_7B, 2), (RSTAR2_1_5B, 1)), "inference.*.sglang.tensor_parallel"),
    fixed("engines are not split into stages", {"rollout.pipeline_parallel_size": 1}),
    same(
        "rollout.max_running_requests", per((RSTAR2_7B, 128), (RSTAR2_1_5B, 256)),
        "inference.*.sglang.max_running_requests",
    ),
    same("rollout.gpu_memory_utilization", 0.5, "inference.*.sglang.memory_share"),
    absent(KERNELS, {
        "rollout.cuda_graph_max_bs": per((RSTAR2_7B, 128), (RSTAR2_1_5B, 256)),
        "rollout.sglang.attention_backend": "triton",
        "rollout.sglang.torch_compile_max_bs": 128,
    }),
    fixed("CUDA graphs are on, compilation by torch is off", {
        "rollout.enforce_eager": False,
        "rollout.sglang.use_torch_compile": False,
    }),
    fixed("engines take and give tokens, never text", {"rollout.detokenize": False}),
    absent("the chat template is the tokenizer's own; the workflow writes the system turn and the list of tools", {
        "rollout.custom_chat_template": Text(
            "d7aaf19d90236aff2f9f427e4bc5fd78c70bc35df68b0d113758db3ed364ca86", "a template of its own, 3413 characters",
        ),
    }),
    absent(PRINTS, {
        "rollout.print_outputs": False,
        "rollout.disable_log_stats": False,
        "rollout.sglang.decode_log_interval": 500_000,
        "agentloop.print_outputs": True,
    }),
    absent("every version is verified by its digest before its use", {
        "rollout.validate_weight": False,
        "rollout.validate_save_dir": None,
    }),
    absent(VLLM, {
        "rollout.distributed_executor_backend": "mp",
        "rollout.vllm.attention_backend": "FLASH_ATTN",
        "rollout.vllm.enable_chunked_prefill": True,
        "rollout.vllm.enable_flash_infer_sampler": True,
        "rollout.vllm.enable_prefix_caching": True,
        "rollout.vllm.max_num_batched_tokens": None,
        "rollout.vllm.torch_profiler_dir": None,
    }),
    absent(RECOMPUTING, {
        "inference.load_from_actor": True,
        "inference.model.pipeline_model_parallel_size": 1,
        "inference.model.sequence_parallel": per((RSTAR2_7B, True), (RSTAR2_1_5B, False)),
        "inference.model.tensor_model_parallel_size": per((RSTAR2_7B, 2), (RSTAR2_1_5B, 1)),
    }),
    absent(GROUPS, {
        "actor.group_name": "ActorGroup",
        "agentloop.group_name": "AgentLoopGroup",
        "inference.group_name": "InferenceGroup",
        "reward.group_name": "RewardGroup",
        "rollout.group_name": "RolloutGroup",
    }),
    departs(
        "cluster.component_placement.actor,rollout,reward", "all", reading.gpus,
        "[0, 1, 2, 3] generate, [4, 5, 6, 7] train",
        "generation and training overlap instead of taking turns on the same GPUs",
    ),
    same("cluster.num_nodes", 1, reading.nodes),
    same("algorithm.sampling_params.temperature", 1.0, "sampling.temperature"),
    same("algorithm.sampling_params.top_k", -1, "sampling.top_k", renamed({-1: 0})),
    same("algorithm.sampling_params.top_p", 1.0, "sampling.top_p"),
    same("algorithm.sampling_params.min_new_tokens", 1, "sampling.min_new_tokens"),
    same("algorithm.sampling_params.min_new_tokens", 1, "evaluation.samplings.*.min_new_tokens", aspect="evaluation"),
    same(
        "algorithm.sampling_params.max_new_tokens", "${subtract:${runner.seq_length}, ${data.max_prompt_length}}",
        "sampling.max_new_tokens", reading.longest_response,
    ),
    departs(
        "algorithm.sampling_params.max_new_tokens", "${subtract:${runner.seq_length}, ${data.max_prompt_length}}",
        "evaluation.samplings.*.max_new_tokens", 30_720, "as in rStar2's report", aspect="evaluation",
        convert=reading.longest_response,
    ),
    fixed("there is no penalty on repetition", {"algorithm.sampling_params.repetition_penalty": 1.0}),
    fixed("training rollouts are sampled: a temperature of 0 is refused", {"algorithm.sampling_params.do_sample": True}),
    same("runner.seq_length", 10_240, reading.longest_sequence),
    same("agentloop.max_assistant_turns", 5, "workflow.settings.max_turns"),
    same("agentloop.max_tool_response_length", 256, "workflow.settings.max_tool_response_chars"),
    same("agentloop.toolcall_parser", "rstar2-qwen", "workflow.settings.format", renamed({"rstar2-qwen": "json"})),
    fixed("only the first call of a turn is run", {"agentloop.max_parallel_calls": 1}),
    fixed("a long tool response is cut in the middle", {"agentloop.tool_response_truncate_side": "middle"}),
    fixed("a failed call is answered with its error", {"agentloop.continue_at_tool_failure": True}),
    absent("tool responses are bounded by the assistant's turns", {"agentloop.max_user_turns": None}),
    fixed("one kind of task", {"runner.task_type": "reasoning"}),
)  # fmt: skip

DATA_AND_REWARD = rows(
    HYDRA, RSTAR2,
    departs(
        "data.train_data_paths", ["/path/to/train.jsonl"], "data.train.name", "dapo-math-17k",
        "a path to fill in there; here the data set is named and fetched. `data.train.path` takes a file",
    ),
    absent("rows are brought into one form when a data set is opened, `rollmill data rstar2` reads both of its layouts", {
        "data.type": "rstar2",
        "data.prompt_key": "prompt",
        "data.answer_key": "solutions",
    }),
    same("data.max_prompt_length", 2048, "data.train.max_prompt_tokens"),
    fixed("longer prompts are left out of training, and counted", {"data.filter_prompt_by_length": True}),
    fixed("the model's chat template makes the prompt", {"data.apply_chat_template": True}),
    same("data.rollout_batch_size", 128, "policies.*.batch.size", reading.tasks_as_kept_rollouts),
    same("data.seed", 1234, "run.seed"),
    same("data.shuffle", True, "data.train.shuffle"),
    absent("an evaluation plays every task in the order of its rows", {"data.validation_shuffle": True}),
    absent("tasks are drawn by the orchestrator itself", {"data.num_workers": 2}),
    departs(
        "runner.val_check_interval", 1, "evaluation.every", 25,
        "its files name no data to evaluate on; here three sets are played, with four samples of up to 30,720 tokens each",
    ),
    departs(
        "reward.reward_type", "rstar2", "workflow.settings.reward", "math",
        "Math-Verify and rules, the grader of all math recipes, in processes with a hard limit; there Math-Verify, and then sympy "
        "and pylatexenc with a relative tolerance of 1e-4: either accepts, so 10001 is 10000, and a bare list that ends in the "
        "number is right",
    ),
    fixed("rewards are computed by rules", {"reward.use_reward_model": False}),
    departs(
        "tools.codejudge.concurrency_limit", 128, "envgateway.sandbox.num_slots", 64,
        "as many as its judge runs at once (MAX_WORKERS=64); further calls wait in the gateway's queue",
    ),
    same("tools.codejudge.host_addr", "127.0.0.1", "envgateway.host"),
    departs(
        "tools.codejudge.host_port", 8000, "envgateway.port", 50080,
        "gRPC; Code Judge's HTTP interface is served as well when `CODE_JUDGE_PORT` is set",
    ),
    absent("tools are those of the gateway and of `envgateway.tools.paths`", {"tools.mcp_file_system": None}),
    fixed("metrics are written as TensorBoard event files", {"runner.logger.logger_backends": ["tensorboard"]}),
    departs("runner.output_dir", "../results", "run.dir", "runs", "every run has its own directory there"),
    absent("a run is named by its recipe and the time, or by `run.id`", {
        "runner.experiment_name": per((RSTAR2_7B, "rstar2-7b"), (RSTAR2_1_5B, "rstar2-1.5b")),
        "runner.logger.experiment_name": "${runner.experiment_name}",
        "runner.logger.log_path": "${runner.output_dir}/${runner.experiment_name}",
        "runner.logger.project_name": "rlinf",
    }),
    absent(HYDRA_ITSELF, {
        "defaults[0].override hydra/job_logging": "stdout",
        "hydra.output_subdir": None,
        "hydra.run.dir": ".",
    }),
)  # fmt: skip

RSTAR2_ROWS = [*TRAINING, *ALGORITHM, *ROLLOUTS, *DATA_AND_REWARD]

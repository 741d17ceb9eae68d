"""Checks of a recipe that concern several of its sections: what one asks for, another must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config.data import (
    DEFAULT_NEW_TOKENS,
    TRAIN,
    DataConfig,
    EvaluationConfig,
    SamplingConfig,
    WorkflowConfig,
)
from services.common.config.processes.servers import MASK_TOKENS
from services.common.config.processes.services import InferenceConfig, RolloutConfig, WarmStartConfig
from services.common.config.training.policy import PolicyConfig
from services.common.harbor.places import ENVIRONMENT as HARBOR
from services.common.records.dataset_rows import BuiltInWorkflow

ENGINES_WITH_ADAPTERS = ("torch", "sglang", "forced", "scripted")


def check_served(
    policies: dict[str, PolicyConfig], inference: dict[str, InferenceConfig], rollout: RolloutConfig
) -> None:
    """Check that an inference service serves each policy, and that policies which play together share one. Raises ``ValueError``."""
    for name, service in inference.items():
        for policy in service.policies:
            if policy not in policies:
                raise ValueError(
                    f"inference.{name}.policies names {policy!r}, which is no policy of this recipe; "
                    f"write one of {sorted(policies)}"
                )
    for policy in policies:
        if not any(not s.policies or policy in s.policies for s in inference.values()):
            raise ValueError(f"no inference service serves policy {policy!r}: add it to inference.<name>.policies")
    whole = any(not s.policies or set(s.policies) == set(policies) for s in inference.values())
    if rollout.policies == "together" and not whole:
        raise ValueError(
            f"no inference service serves all of {sorted(policies)}, which play together in one rollout: "
            "leave inference.<name>.policies of one of them empty, or set rollout.policies to apart"
        )


def check_adapters(policies: dict[str, PolicyConfig], inference: dict[str, InferenceConfig]) -> None:
    """Check that every engine that serves a policy with an adapter can serve one. Raises ``ValueError``."""
    for name, service in inference.items():
        for policy in service.policies or policies:
            if policies[policy].adapter is not None and service.engine not in ENGINES_WITH_ADAPTERS:
                raise ValueError(
                    f"policies.{policy}.adapter is set, and the engine of inference.{name} is {service.engine!r}, which "
                    f"serves no adapters: write inference.{name}.engine {' or '.join(ENGINES_WITH_ADAPTERS[:2])}, or leave "
                    "adapter out"
                )
            if policies[policy].adapter is not None and service.engine == "sglang":
                _check_adapter_on_sglang(policy, name, service)


def _check_adapter_on_sglang(policy: str, name: str, service: InferenceConfig) -> None:
    if service.kv_policy == "keep":
        raise ValueError(
            f"inference.{name}.kv_policy is keep, and policies.{policy}.adapter is set: SGLang keeps no cache across "
            "adapters: write recompute"
        )
    if service.sglang.update != "disk":
        raise ValueError(
            f"inference.{name}.sglang.update is {service.sglang.update}, and policies.{policy}.adapter is set: SGLang reads "
            "adapters from files: write disk"
        )


def check_teachers(
    teachers: dict[str, str],
    policies: dict[str, PolicyConfig],
    sampling: SamplingConfig,
    inference: dict[str, InferenceConfig],
) -> None:
    """Check that each teacher, by student, can score what its student samples. Raises ``ValueError``."""
    for student, name in teachers.items():
        where = f"policies.{student}.algorithm.distillation.teacher"
        teacher = policies.get(name)
        if teacher is None:
            raise ValueError(
                f"{where} is {name!r}, which is no policy of this recipe (it has {sorted(policies)}): add "
                f"policies.{name} with trained: false, or name a model in teacher_model, which the trainer then loads"
            )
        if teacher.trained:
            raise ValueError(f"{where} is {name!r}, which is trained itself: write policies.{name}.trained: false")
        own = policies[student].model.context_length
        if teacher.model.context_length < own:
            raise ValueError(
                f"policies.{name}.model.context_length ({teacher.model.context_length}) is below the {own} of {student}, "
                f"whose sequences {name} scores: write {own}"
            )
        if cuts := sampling.cuts():
            raise ValueError(
                f"sampling has {', '.join(cuts)}, and {where} scores tokens over the whole vocabulary: write top_p 1, "
                "top_k 0, min_p 0 and min_new_tokens 0, or name the teacher's model in teacher_model instead"
            )
        _check_teacher_is_served(student, name, where, inference)


def _check_teacher_is_served(student: str, teacher: str, where: str, inference: dict[str, InferenceConfig]) -> None:
    for name, service in inference.items():
        if service.policies and student not in service.policies:
            continue
        if service.policies and teacher not in service.policies:
            raise ValueError(
                f"inference.{name}.policies has {student!r} without its teacher {teacher!r} ({where}): add it, the "
                "replica that plays a rollout scores it"
            )
        if service.servers is not None:
            raise ValueError(
                f"{where} is {teacher!r}, and the {service.engine} engine of inference.{name} cannot score tokens: write "
                f"inference.{name}.engine torch, or name the teacher's model in teacher_model instead"
            )


def with_default_budgets(tree: Any) -> Any:
    """The tree of a recipe with a budget in each way of sampling that names none.

    Training: half of a context of up to 2048 tokens, because the default of 1024 would leave no room for a prompt, or
    little. Evaluation: the budget of training.
    """
    if not isinstance(tree, Mapping):
        return tree
    policies = tree.get("policies")
    named = policies.values() if isinstance(policies, Mapping) else ()
    sections = [policy.get("model") for policy in named if isinstance(policy, Mapping)]
    contexts = [model.get("context_length") for model in sections if isinstance(model, Mapping)]
    smallest = min((context for context in contexts if type(context) is int and context >= 8), default=None)

    def filled(section: Any, budget: Any) -> Any:
        known = isinstance(section, Mapping) and "max_new_tokens" not in section
        return {**section, "max_new_tokens": budget} if known else section

    sampling = tree.get("sampling", {})
    if smallest is not None and smallest // 2 < DEFAULT_NEW_TOKENS:
        sampling = filled(sampling, smallest // 2)
    if not isinstance(sampling, Mapping) or "max_new_tokens" not in sampling:
        return tree
    evaluation, samplings = tree.get("evaluation", {}), None
    if isinstance(evaluation, Mapping):
        samplings = evaluation.get("samplings", {"greedy": {"temperature": 0.0}})
    if isinstance(samplings, Mapping):
        inherited = {name: filled(section, sampling["max_new_tokens"]) for name, section in samplings.items()}
        evaluation = {**evaluation, "samplings": inherited}
    return {**tree, "sampling": sampling, "evaluation": evaluation}


def check_models(
    policies: dict[str, PolicyConfig], warm_start: dict[str, WarmStartConfig], sampling: SamplingConfig
) -> None:
    """Check that each policy has a starting checkpoint, and room for a prompt. Raises ``ValueError``."""
    for name in warm_start:
        if name not in policies:
            raise ValueError(f"warm_start.{name} is for no policy of this recipe; write one of {sorted(policies)}")
    for name, policy in policies.items():
        if policy.model.path is None and name not in warm_start:
            others = ", ".join(other for other in policies if other != name)
            raise ValueError(
                f"policies.{name}.model.path is missing: write a model directory or a hub name, or how to make it "
                f"under warm_start.{name}" + (f"; {name!r} is a policy of its own beside {others}" if others else "")
            )
        if sampling.max_new_tokens >= policy.model.context_length:
            raise ValueError(
                f"sampling.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a prompt in "
                f"policies.{name}.model.context_length ({policy.model.context_length})"
            )


def check_batches(trained_policies: dict[str, PolicyConfig], rollout: RolloutConfig) -> None:
    """Check that the groups of rollouts fit the batches and algorithms of the trained policies. Raises ``ValueError``."""
    for name, policy in trained_policies.items():
        if policy.batch.minibatches > policy.batch.size:
            raise ValueError(
                f"policies.{name}.batch.minibatches ({policy.batch.minibatches}) exceeds batch.size "
                f"({policy.batch.size}): a minibatch needs at least one sequence"
            )
        resample = policy.batch.resample
        if resample is not None and resample.keep > rollout.group_size:
            raise ValueError(
                f"policies.{name}.batch.resample.keep ({resample.keep}) exceeds rollout.group_size "
                f"({rollout.group_size}): there is nothing to leave out"
            )
        pass_k = policy.algorithm.pass_k
        if pass_k is not None and pass_k > rollout.group_size:
            raise ValueError(
                f"policies.{name}.algorithm.pass_k ({pass_k}) exceeds rollout.group_size ({rollout.group_size}): no group "
                "has as many rollouts"
            )
        for key, reward in (
            ("timeout_reward", rollout.timeout_reward), ("truncation_reward", rollout.truncation_reward),
        ):  # fmt: skip
            if reward is not None and not policy.algorithm.takes_reward(reward):
                raise ValueError(
                    f"rollout.{key} is {reward:g}, and policies.{name}.algorithm.advantage: {policy.algorithm.advantage} "
                    f"needs rewards {policy.algorithm.reward_range}: write such a one, or leave {key} out"
                )
        if policy.batch.dynamic_sampling and rollout.group_size == 1:
            raise ValueError(
                f"policies.{name}.batch.dynamic_sampling drops every group when rollout.group_size is 1: "
                "set dynamic_sampling to false, or group_size to 2 or more"
            )


def check_mixture(data: DataConfig, trained_policies: dict[str, PolicyConfig]) -> None:
    """Check that the settings of sources fit the algorithms of the trained policies. Raises ``ValueError``."""
    for place, source in enumerate(data.sources.values()):
        for name, policy in trained_policies.items():
            if source.advantage_scale != 1.0 and policy.algorithm.gives_token_credit:
                raise ValueError(
                    f"data.train.{place}.advantage_scale is {source.advantage_scale:g}, and policies.{name}.algorithm gives each "
                    "token an advantage of its own (gae, gamma below 1, kl_reward_coefficient or distillation): leave "
                    "advantage_scale out"
                )


def check_environments(data: DataConfig, workflow: WorkflowConfig, evaluation: EvaluationConfig) -> None:
    """Check that tasks of verifiers environments and of Harbor are played by a workflow that can. Raises ``ValueError``."""
    for where, source in data.sections().items():
        played = workflow if where.startswith(TRAIN) else evaluation.workflow or workflow
        if source.workflow is not None and "name" in source.workflow.model_fields_set:
            played = source.workflow
        if source.verifiers is not None and played.name != BuiltInWorkflow.VERIFIERS and ":" not in played.name:
            raise ValueError(
                f"{where}.verifiers is {source.verifiers!r}, and the workflow {played.name} cannot play an environment: write "
                f"workflow: {{name: {BuiltInWorkflow.VERIFIERS}}}"
            )
        settings = {**played.settings, **(source.workflow.settings if source.workflow is not None else {})}
        by_its_tests = played.name == BuiltInWorkflow.AGENT_ENV and settings.get("environment") == HARBOR
        if source.harbor is not None and not by_its_tests and ":" not in played.name:
            raise ValueError(
                f"{where}.harbor is {source.harbor!r}, and the workflow {played.name} does not run its tests: write workflow: "
                f"{{name: {BuiltInWorkflow.AGENT_ENV}, settings: {{environment: {HARBOR}}}}}"
            )


def check_sampling(trains: bool, sampling: SamplingConfig, inference: dict[str, InferenceConfig]) -> None:
    """Check that each engine tells which tokens it could draw, where training needs them. Raises ``ValueError``."""
    cuts = sampling.cuts() if trains else []
    for name, service in inference.items():
        if cuts and not service.tells_kept_tokens:
            raise ValueError(
                f"sampling has {', '.join(cuts)}, and the {service.engine} engine of inference.{name} does not tell which "
                f"tokens that leaves to draw from, so what it samples cannot be trained: write inference.{name}.engine "
                "torch, sglang or vllm, or top_p 1, top_k 0, min_p 0 and min_new_tokens 0 (evaluation.samplings may truncate)"
            )
        if service.servers is not None and sampling.top_k > MASK_TOKENS:
            raise ValueError(
                f"sampling.top_k is {sampling.top_k}, and the {service.engine} servers of inference.{name} tell of at most "
                f"{MASK_TOKENS} tokens which could be drawn: write fewer, or 0 (off)"
            )


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, policies: dict[str, PolicyConfig]) -> None:
    """Check that evaluations have datasets and name policies of the recipe. Raises ``ValueError``."""
    if not data.evaluation and (evaluation.at_start or evaluation.at_end or evaluation.every):
        raise ValueError(
            "evaluation is on but data.evaluation is missing: name a dataset there, such as the rows of data.train with "
            "hold_out: 20 in both, or set evaluation.at_start and evaluation.at_end to false and evaluation.every to 0"
        )
    for name, dataset in data.evaluation.items():
        if evaluation.max_in_flight is not None and evaluation.max_in_flight < (dataset.samples_per_task or 0):
            raise ValueError(
                f"evaluation.max_in_flight {evaluation.max_in_flight} is below data.evaluation.{name}.samples_per_task "
                f"{dataset.samples_per_task}: the trajectories of a task are issued together"
            )
    for policy in evaluation.policies:
        if policy not in policies:
            raise ValueError(
                f"evaluation.policies names {policy!r}, which is no policy of this recipe; "
                f"write one of {sorted(policies)}"
            )


def check_evaluation_fits(
    evaluation: EvaluationConfig, data: DataConfig, inference: dict[str, InferenceConfig]
) -> None:
    """Check that one replica can play all samples of a task. Raises ``ValueError``."""
    slots = max((service.num_slots for service in inference.values()), default=None)
    wanted = {"evaluation.samples_per_task": evaluation.samples_per_task} if data.evaluation else {}
    wanted |= {
        f"{where}.samples_per_task": config.samples_per_task
        for where, config in data.sections().items()
        if config.samples_per_task is not None
    }
    for key, samples in wanted.items():
        if slots is not None and samples > slots:
            raise ValueError(
                f"{key} ({samples}) exceeds the num_slots of every inference service ({slots} at most): the samples "
                "of a task are played by one replica"
            )


# A rollout of these leaves one sequence of the policy, so that a task group leaves rollout.group_size of them.
ONE_SEQUENCE = (
    BuiltInWorkflow.SINGLE_TURN,
    BuiltInWorkflow.TOOL_USE,
    BuiltInWorkflow.TOOL_MATH,
    BuiltInWorkflow.AGENT_ENV,
)
# A rollout of these brings several sequences, of a number that is known only when it ends.
_SEVERAL_SEQUENCES = (
    BuiltInWorkflow.ACTOR_VERIFIER,
    BuiltInWorkflow.CODEGEN_VERIFIER,
    BuiltInWorkflow.EXTERNAL_AGENT,
)


def conflicts(
    policies: Mapping[str, PolicyConfig],
    workflow: WorkflowConfig,
    data: DataConfig,
    inference: Mapping[str, InferenceConfig],
) -> list[str]:
    """Settings that ``run.deterministic`` refuses, each with the setting to write instead.

    Without them one seed gives the same weights, bit for bit (docs/protocol.md): the final weights depend neither on when
    rollouts finish, nor on which replica plays them, nor on which processes die meanwhile.
    """
    return [*_of_the_run(policies, workflow, data), *_of_policies(policies), *_of_engines(inference)]


def _of_the_run(policies: Mapping[str, PolicyConfig], workflow: WorkflowConfig, data: DataConfig) -> list[str]:
    found = []
    if len(policies) > 1:
        found.append(f"policies has {', '.join(policies)}: keep one")
    if workflow.name in _SEVERAL_SEQUENCES:
        found.append(
            f"workflow.name is {workflow.name}, whose rollouts bring several sequences: write one of "
            f"{', '.join(ONE_SEQUENCE)}"
        )
    if data.sources:
        found.append(f"data.train mixes {', '.join(data.sources)}: write one dataset")
    if data.curation != "accept_all":
        found.append(f"data.curation is {data.curation}, which chooses tasks by finished rollouts: write accept_all")
    return found


def _of_policies(policies: Mapping[str, PolicyConfig]) -> list[str]:
    found = []
    for name, policy in policies.items():
        where = f"policies.{name}"
        if policy.batch.max_staleness:
            found.append(
                f"{where}.batch.max_staleness is {policy.batch.max_staleness}: write 0, so that every rollout of a step plays "
                "the version before it"
            )
        if policy.batch.replay.ratio:
            found.append(f"{where}.batch.replay.ratio is {policy.batch.replay.ratio:g}: write 0")
        trainer = policy.trainer
        for key, value, wanted in (
            ("device", trainer.device, "cpu"), ("num_ranks", trainer.num_ranks, 1), ("threads", trainer.threads, 1),
        ):  # fmt: skip
            if value != wanted:
                found.append(f"{where}.trainer.{key} is {value}: write {wanted}")
    return found


def _of_engines(inference: Mapping[str, InferenceConfig]) -> list[str]:
    found = []
    for name, service in inference.items():
        where = f"inference.{name}"
        if service.servers is not None:
            found.append(
                f"{where}.engine is {service.engine}, whose arithmetic depends on which requests run together: write torch"
            )
            continue
        if ":" in service.engine:
            found.append(f"{where}.engine is {service.engine}, which is not known to be deterministic: write torch")
            continue
        if service.engine_slots not in (None, 1):
            found.append(
                f"{where}.engine_slots is {service.engine_slots}: leave it out, one request is computed at a time"
            )
        if service.engine != "scripted":
            for key, value, wanted in (("device", service.device, "cpu"), ("threads", service.threads, 1)):
                if value != wanted:
                    found.append(f"{where}.{key} is {value}: write {wanted}")
    return found

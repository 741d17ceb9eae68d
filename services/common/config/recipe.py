"""The recipe: everything a run needs, in one validated tree. No torch, no grpc: loads in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from services.common.config.base import Section
from services.common.config.data import (
    DEFAULT_NEW_TOKENS,
    DataConfig,
    EvaluationConfig,
    SamplingConfig,
    WorkflowConfig,
    is_training,
    merge,
)
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.processes import (
    MASK_TOKENS,
    SERVER_START_S,
    InferenceConfig,
    LaunchConfig,
    MetricsConfig,
    OrchestratorConfig,
    Placement,
    RolloutConfig,
    Tracker,
    WarmStartConfig,
    check_placement,
)
from services.common.config.training import (
    EXACT_MISMATCH,
    ROUNDED_MISMATCH,
    OptimizerConfig,
    PolicyConfig,
    UntilConfig,
)
from services.common.dataset_rows import HARBOR, BuiltInWorkflow
from services.common.net.hosts import is_loopback

# --- Checks of a recipe that concern several of its sections: what one asks for, another must have. Each raises
# ``ValueError`` with the key and the setting to write instead.


ENGINES_WITH_ADAPTERS = ("torch", "sglang", "forced", "scripted")


def check_served(recipe: Recipe) -> None:
    """An inference service serves each policy, and policies which play together share one."""
    policies, inference = recipe.policies, recipe.inference
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
    if recipe.rollout.policies == "together" and not whole:
        raise ValueError(
            f"no inference service serves all of {sorted(policies)}, which play together in one rollout: "
            "leave inference.<name>.policies of one of them empty, or set rollout.policies to apart"
        )


def check_adapters(recipe: Recipe) -> None:
    """Every engine that serves a policy with an adapter can serve one."""
    for name, service in recipe.inference.items():
        for policy in service.policies or recipe.policies:
            if recipe.policies[policy].adapter is None:
                continue
            if service.engine not in ENGINES_WITH_ADAPTERS:
                raise ValueError(
                    f"policies.{policy}.adapter is set, and the engine of inference.{name} is {service.engine!r}, which "
                    f"serves no adapters: write inference.{name}.engine {' or '.join(ENGINES_WITH_ADAPTERS[:2])}, or leave "
                    "adapter out"
                )
            # SGLang keeps no cache across adapters, and reads them from files.
            for key, value, wanted in (
                ("kv_policy", service.kv_policy, "recompute"), ("sglang.update", service.sglang.update, "disk"),
            ):  # fmt: skip
                if service.engine == "sglang" and value != wanted:
                    raise ValueError(
                        f"inference.{name}.{key} is {value}, and policies.{policy}.adapter is set, which SGLang cannot serve so: "
                        f"write {wanted}"
                    )


def check_trained(recipe: Recipe) -> None:
    """There is something to train, and how tokens are sampled can be trained."""
    if recipe.run.steps and not recipe.trained_policies:
        raise ValueError(
            f"run.steps is {recipe.run.steps}, but trained is false for each of {sorted(recipe.policies)}: leave it out of "
            "the policy to train, or set run.steps to 0"
        )
    if recipe.sampling.temperature == 0:
        raise ValueError("sampling.temperature is 0: greedy rollouts of a group are all alike; write a value above 0")


def check_teachers(recipe: Recipe) -> None:
    """Each teacher can score what its student samples."""
    policies = recipe.policies
    for student, name in recipe.teachers.items():
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
        if cuts := recipe.sampling.cuts():
            raise ValueError(
                f"sampling has {', '.join(cuts)}, and {where} scores tokens over the whole vocabulary: write top_p 1, "
                "top_k 0, min_p 0 and min_new_tokens 0, or name the teacher's model in teacher_model instead"
            )
        _check_teacher_is_served(recipe, student, name, where)


def _check_teacher_is_served(recipe: Recipe, student: str, teacher: str, where: str) -> None:
    for name, service in recipe.inference.items():
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


def check_models(recipe: Recipe) -> None:
    """Each policy has a starting checkpoint, and room for a prompt."""
    policies, max_new_tokens = recipe.policies, recipe.sampling.max_new_tokens
    for name in recipe.warm_start:
        if name not in policies:
            raise ValueError(f"warm_start.{name} is for no policy of this recipe; write one of {sorted(policies)}")
    for name, policy in policies.items():
        if policy.model.path is None and name not in recipe.warm_start:
            others = ", ".join(other for other in policies if other != name)
            raise ValueError(
                f"policies.{name}.model.path is missing: write a model directory or a hub name, or how to make it "
                f"under warm_start.{name}" + (f"; {name!r} is a policy of its own beside {others}" if others else "")
            )
        if max_new_tokens >= policy.model.context_length:
            raise ValueError(
                f"sampling.max_new_tokens ({max_new_tokens}) leaves no room for a prompt in "
                f"policies.{name}.model.context_length ({policy.model.context_length})"
            )


def check_batches(recipe: Recipe) -> None:
    """The groups of rollouts, and the sources of tasks, fit the batches and algorithms of the trained policies."""
    rollout = recipe.rollout
    for name, policy in recipe.trained_policies.items():
        if policy.batch.minibatches > policy.batch.size:
            raise ValueError(
                f"policies.{name}.batch.minibatches ({policy.batch.minibatches}) exceeds batch.size "
                f"({policy.batch.size}): a minibatch needs at least one sequence"
            )
        keep = None if policy.batch.resample is None else policy.batch.resample.keep
        for key, number in (("batch.resample.keep", keep), ("algorithm.pass_k", policy.algorithm.pass_k)):
            if number is not None and number > rollout.group_size:
                raise ValueError(
                    f"policies.{name}.{key} ({number}) exceeds rollout.group_size ({rollout.group_size}): no group has as "
                    "many rollouts"
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
        for place, source in enumerate(recipe.data.sources.values()):
            if source.advantage_scale != 1.0 and policy.algorithm.gives_token_credit:
                raise ValueError(
                    f"data.train.{place}.advantage_scale is {source.advantage_scale:g}, and policies.{name}.algorithm gives each "
                    "token an advantage of its own (gae, gamma below 1, kl_reward_coefficient or distillation): leave "
                    "advantage_scale out"
                )


def check_environments(recipe: Recipe) -> None:
    """Tasks of verifiers environments and of Harbor are played by a workflow that can."""
    for where, source in recipe.data.sections().items():
        played = recipe.workflow_of(where)
        if source.verifiers is not None and played.name != BuiltInWorkflow.VERIFIERS and ":" not in played.name:
            raise ValueError(
                f"{where}.verifiers is {source.verifiers!r}, and the workflow {played.name} cannot play an environment: write "
                f"workflow: {{name: {BuiltInWorkflow.VERIFIERS}}}"
            )
        by_its_tests = played.name == BuiltInWorkflow.AGENT_ENV and played.settings.get("environment") == HARBOR
        if source.harbor is not None and not by_its_tests and ":" not in played.name:
            raise ValueError(
                f"{where}.harbor is {source.harbor!r}, and the workflow {played.name} does not run its tests: write workflow: "
                f"{{name: {BuiltInWorkflow.AGENT_ENV}, settings: {{environment: {HARBOR}}}}}"
            )


def check_sampling(recipe: Recipe) -> None:
    """Each engine tells which tokens it could draw, where training needs them."""
    sampling = recipe.sampling
    cuts = sampling.cuts() if recipe.run.steps else []
    for name, service in recipe.inference.items():
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


def check_evaluation(recipe: Recipe) -> None:
    """Evaluations have datasets, name policies of the recipe, and one replica can play all samples of a task."""
    evaluation, data = recipe.evaluation, recipe.data
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
        if policy not in recipe.policies:
            raise ValueError(
                f"evaluation.policies names {policy!r}, which is no policy of this recipe; "
                f"write one of {sorted(recipe.policies)}"
            )
    slots = max(service.num_slots for service in recipe.inference.values())
    wanted = {"evaluation.samples_per_task": evaluation.samples_per_task} if data.evaluation else {}
    wanted |= {
        f"{where}.samples_per_task": config.samples_per_task
        for where, config in data.sections().items()
        if config.samples_per_task is not None
    }
    for key, samples in wanted.items():
        if samples > slots:
            raise ValueError(
                f"{key} ({samples}) exceeds the num_slots of every inference service ({slots} at most): the samples "
                "of a task are played by one replica"
            )


def check_until(recipe: Recipe) -> None:
    """The threshold that ends training is on an evaluation that this recipe makes."""
    until, evaluation, datasets = recipe.run.until, recipe.evaluation, recipe.data.evaluation
    if until is None:
        return
    # policies that have passes of their own
    apart = [policies[0] for policies in recipe.evaluation_compositions() if recipe.rollout.policies == "apart"]
    during = evaluation.during_samplings or list(evaluation.samplings)
    if until.evaluation not in evaluation.samplings:
        raise ValueError(
            f"run.until.evaluation names {until.evaluation!r}, which is no way of sampling of this recipe; write one of "
            f"evaluation.samplings: {sorted(evaluation.samplings)}"
        )
    if not evaluation.every:
        raise ValueError(
            "run.until ends training by an evaluation, and evaluation.every is 0, so that none is played while it lasts: set "
            "evaluation.every to a number of steps, or run.until to null"
        )
    if until.evaluation not in during:
        raise ValueError(
            f"run.until.evaluation is {until.evaluation!r}, which evaluation.during_samplings ({during}) leaves out: add it there"
        )
    if until.dataset is not None and until.dataset not in datasets:
        raise ValueError(
            f"run.until.dataset names {until.dataset!r}, which is none of data.evaluation; write one of {sorted(datasets)}"
        )
    if isinstance(until.at_least, dict) and set(until.at_least) != set(apart):
        told = (
            f"it must have a number for each of {sorted(apart)}"
            if apart
            else "the policies of this recipe play together and share one result: write one number"
        )
        raise ValueError(f"run.until.at_least is for {sorted(until.at_least)}: {told}")
    k = until.pass_at
    if k is None:
        return
    for name, dataset in datasets.items():
        samples = dataset.samples_per_task or evaluation.samples_per_task
        if until.dataset in (None, name) and (k > samples or k & (k - 1)):
            raise ValueError(
                f"run.until.metric is {until.metric}, and data.evaluation.{name} has {samples} samples of a task: k is a power "
                "of two up to that; write another k, or raise samples_per_task"
            )
    numbers = until.at_least.values() if isinstance(until.at_least, dict) else (until.at_least,)
    for number in numbers:
        if not 0.0 < number <= 1.0:
            raise ValueError(
                f"run.until.at_least is {number:g}, and {until.metric} is a share: write one above 0, up to 1"
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


def check_deterministic(recipe: Recipe) -> None:
    """No setting excludes ``run.deterministic``.

    Without them one seed gives the same weights, bit for bit (docs/chaos.md): the final weights depend neither on when
    rollouts finish, nor on which replica plays them, nor on which processes die meanwhile.
    """
    if not recipe.run.deterministic:
        return
    found, workflow, data = [], recipe.workflow, recipe.data
    if len(recipe.policies) > 1:
        found.append(f"policies has {', '.join(recipe.policies)}: keep one")
    if workflow.name in _SEVERAL_SEQUENCES:
        found.append(
            f"workflow.name is {workflow.name}, whose rollouts bring several sequences: write one of "
            f"{', '.join(ONE_SEQUENCE)}"
        )
    if data.sources:
        found.append(f"data.train mixes {', '.join(data.sources)}: write one dataset")
    if data.curation != "accept_all":
        found.append(f"data.curation is {data.curation}, which chooses tasks by finished rollouts: write accept_all")
    if recipe.run.until is not None:
        found.append("run.until ends training when an evaluation beside it is done, whenever that is: write null")
    wanted: list[tuple[str, object, object]] = []  # key, value, the value to write
    for name, policy in recipe.policies.items():
        batch, trainer, where = policy.batch, policy.trainer, f"policies.{name}"
        wanted += [
            (f"{where}.batch.max_staleness", batch.max_staleness, 0),
            (f"{where}.batch.replay.ratio", batch.replay.ratio, 0),
            (f"{where}.trainer.device", trainer.device, "cpu"),
            (f"{where}.trainer.num_ranks", trainer.num_ranks, 1),
            (f"{where}.trainer.threads", trainer.threads, 1),
        ]
    for name, service in recipe.inference.items():
        where = f"inference.{name}"
        if service.servers is not None or ":" in service.engine:
            found.append(
                f"{where}.engine is {service.engine}, whose arithmetic may depend on which requests run together: write torch"
            )
        elif service.engine != "scripted":
            wanted += [(f"{where}.device", service.device, "cpu"), (f"{where}.threads", service.threads, 1)]
    found += [f"{key} is {value}: write {right}" for key, value, right in wanted if value != right]
    if found:
        raise ValueError(f"run.deterministic cannot hold: {'; '.join(found)}")


def check_security(recipe: Recipe) -> None:
    """Nothing that other machines reach does without TLS."""
    away = [f"{where} is {host}" for where, host in recipe.hosts.items() if not is_loopback(host)]
    if recipe.security.tls == "off" and away:
        raise ValueError(
            f"security.tls is off, but {', '.join(away)}: only loopback may do without; write 127.0.0.1, or leave "
            "security.tls out"
        )
    gateway = recipe.envgateway
    if gateway is not None and gateway.node != 0 and not is_loopback(gateway.host):
        raise ValueError(
            f"envgateway.host is {gateway.host}, but on node {gateway.node} (envgateway.node) the gateway listens at the "
            "address of that node: leave host out, and set NODE_HOST there to choose an address"
        )
    if recipe.security.tls == "off" and len(nodes := recipe.nodes()) > 1:
        raise ValueError(
            f"security.tls is off, but the recipe has processes on nodes {', '.join(map(str, nodes))}, which reach each "
            "other over a network: leave security.tls out, or run everything on node 0"
        )


def check_ports(recipe: Recipe) -> None:
    """No port is taken twice, and ports of metrics are of processes."""
    ports: dict[int, str] = {}
    for where, port in recipe.ports():
        if port and port in ports:
            raise ValueError(f"{where} and {ports[port]} are both {port}: give one of them another port")
        ports[port] = where
    known = recipe.processes_with_metrics()
    for name in recipe.metrics.ports:
        if name not in known:
            raise ValueError(
                f"metrics.ports names {name!r}, which is no process of this recipe; write one of {', '.join(known)}"
            )


# In this order: a later check may rely on an earlier one.
CHECKS = (
    check_served,
    check_adapters,
    check_trained,
    check_teachers,
    check_models,
    check_batches,
    check_environments,
    check_ports,
    check_sampling,
    check_evaluation,
    check_until,
    check_security,
    check_deterministic,
)


class SecurityConfig(Section):
    tls: Literal["auto", "on", "off"] = "auto"
    """`auto`: TLS and keys as soon as any service binds another address than loopback, or ROLLMILL_KEYS is set. `on`: also
    on loopback. `off`: never, so loopback only. `rollmill run` makes the keys; for processes that are started one by one
    `rollmill keys` does."""
    client_certificates: bool = False
    """Off: gRPC callers show a run token with each call. On: they show a certificate in the handshake, which
    fails without one. HTTP takes either while this is off."""

    @field_validator("tls", mode="before")
    @classmethod
    def _yaml_words(cls, value: Any) -> Any:
        """YAML reads a bare `on` or `off` as true or false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class RunConfig(Section):
    id: str | None = None
    """Name of the run and of its directory, in one part: no `/`; left out, recipe name and time."""
    dir: str = "runs"
    """Directory that holds run directories."""
    seed: int = Field(default=1, ge=0)
    """Seeds data order, episodes, sampling, resampling, replay and initial weights (docs/workflows.md)."""
    steps: int = Field(default=100, ge=0)
    """Training steps of each policy, each one published version; 0 only evaluates, without trainers. At most so many with
    `until`."""
    until: UntilConfig | None = None
    """End training as soon as an evaluation has reached a threshold; left out, after `steps` steps."""
    lockstep: bool = False
    """No policy begins a step before all have published the version before it. Otherwise trainers share no barrier."""
    deterministic: bool = False
    """The final weights are the same bits whenever recipe and starting checkpoint are the same, also after crashes.
    Every rollout of a step plays the version before it, batches are made in the order in which task groups were issued,
    and an engine computes one request at a time: slower, for tests and for finding faults. Settings that exclude this
    are refused. Holds on one kind of machine, with judges that give equal answers, while no rollout fails for good."""
    resume: Literal["auto", "never"] = "never"
    """`auto`: `rollmill run RECIPE` goes on with the newest run of this name and these settings in `dir` that has not ended,
    and begins a new one where there is none. `never`: each is a new one. The option --resume goes before it."""

    trackers: list[Tracker] = [Tracker.TENSORBOARD]
    """Where metrics go beside RUN/metrics: `tensorboard`, `wandb`, `trackio`, `otlp` (docs/trackers.md). Their own environment
    variables say where and with which key, such as WANDB_MODE or OTEL_EXPORTER_OTLP_ENDPOINT."""
    fail_when_nothing_learned: bool = False
    """`rollmill run` exits with 3 when the verdict at the end is that a policy has learned nothing (docs/doctor.md)."""

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: list[Tracker]) -> list[Tracker]:
        for tracker in value:
            if value.count(tracker) > 1:
                raise ValueError(f"{tracker} is named twice: name each tracker once")
        return value

    @field_validator("id")
    @classmethod
    def _one_part(cls, value: str | None) -> str | None:
        return value if value is None else one_part(value)


def one_part(name: str) -> str:
    """``name``, which can be that of a directory within another one. Raises ``ValueError`` for one that leads elsewhere."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ValueError(f"{name!r} cannot be the name of a directory: leave out `/`, `\\` and control characters")
    return name


class Recipe(Section):
    """One run. Each key is documented under its field; `rollmill check RECIPE` validates and prints it."""

    name: str
    """Name of the recipe."""
    description: str = ""
    """One line for people."""
    modules: list[str] = []
    """Directories in which modules that are named by import path are looked for, after the current one. The recipe's own folder
    is added when it holds Python files and is no package. On another node they lie at the same paths, or in the directory
    from which the process is started."""
    run: RunConfig = RunConfig()
    """The run as a whole."""
    policies: dict[str, PolicyConfig] = Field(min_length=1)
    """The policies that are trained, by name."""
    workflow: WorkflowConfig = WorkflowConfig()
    """How policies and environment make rollouts."""
    data: DataConfig
    """Tasks."""
    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""
    rollout: RolloutConfig = RolloutConfig()
    """How task groups are played."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How versions are evaluated."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator."""
    inference: dict[str, InferenceConfig] = Field(default={"a": InferenceConfig()}, min_length=1)
    """The inference services of the run, by name. Others may join at any time."""
    placement: Placement = Placement.AUTO
    """`apart`: rollouts and training have devices of their own. `shared`: they take turns on one device, and each frees its
    memory before the other's turn; gpus of trainers and inference services may then be the same (docs/one-card.md). `auto`:
    `rollmill run` takes `shared` where this machine has one GPU, which trainers and engines take without naming it."""
    envgateway: EnvGatewayConfig | None = EnvGatewayConfig()
    """The environment gateway; null when the workflow needs none."""
    warm_start: dict[str, WarmStartConfig] = {}
    """By policy: supervised training that makes its starting checkpoint, before the run."""
    launch: LaunchConfig = LaunchConfig()
    """How processes are started and stopped."""
    security: SecurityConfig = SecurityConfig()
    """Access to the services."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics for Prometheus."""

    @field_validator("name")
    @classmethod
    def _can_name_a_run(cls, value: str) -> str:
        return one_part(value) if value else value  # a time follows

    @field_validator("policies", "inference")
    @classmethod
    def _plain_names(cls, value: dict[str, Section]) -> dict[str, Section]:
        for name in value:
            # No dot and no slash either: they are parts of file names.
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{name!r} is no plain name: use letters, digits, '-' and '_'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_budgets(cls, tree: Any) -> Any:
        return with_default_budgets(tree)

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        # A dataset's workflow without a name, or with that of the run's, has the settings of that one below its own.
        for section, config in self.data.sections().items():
            own, base = config.workflow, self._common_workflow(section)
            if own is not None and ("name" not in own.model_fields_set or own.name == base.name):
                whole = WorkflowConfig(name=base.name, settings=merge(base.settings, own.settings))
                object.__setattr__(config, "workflow", whole)
        for check in CHECKS:
            check(self)
        check_placement(self.inference, self.policies, self.placement)
        return self

    @property
    def trained_policies(self) -> dict[str, PolicyConfig]:
        """The policies that have a trainer, batches and a quota."""
        return {name: policy for name, policy in self.policies.items() if policy.trained}

    @property
    def teachers(self) -> dict[str, str]:
        """The teacher of each trained policy that is taught by a policy of the recipe."""
        settings = {name: policy.algorithm.distillation for name, policy in self.trained_policies.items()}
        return {
            name: found.teacher for name, found in settings.items() if found is not None and found.teacher is not None
        }

    @property
    def playing_policies(self) -> list[str]:
        """Those that rollouts may ask to generate unless they name their policies: a teacher only scores."""
        return [name for name in self.policies if name not in self.teachers.values()]

    def workflow_of(self, section: str) -> WorkflowConfig:
        """The workflow that plays the tasks of a dataset's section (``data.train``, ``data.evaluation.NAME``)."""
        return self.data.sections()[section].workflow or self._common_workflow(section)

    def _common_workflow(self, section: str) -> WorkflowConfig:
        return self.workflow if is_training(section) else self.evaluation.workflow or self.workflow

    def workflows(self) -> dict[str, WorkflowConfig]:
        """Every workflow of the recipe by its key."""
        found = {"workflow": self.workflow, "evaluation.workflow": self.evaluation.workflow}
        found |= {f"{where}.workflow": config.workflow for where, config in self.data.sections().items()}
        return {where: workflow for where, workflow in found.items() if workflow is not None}

    def where_programs_run(self) -> str | None:
        """The first key by which the gateway runs programs (``WorkflowConfig.runs_programs``)."""
        keys = ((where, workflow.runs_programs()) for where, workflow in self.workflows().items())
        return next((f"{where}.{key}" for where, key in keys if key is not None), None)

    def compositions(self) -> list[tuple[str, ...]]:
        """The policies of one training rollout, for each kind of rollout there is; () is all that play."""
        return [()] if self.rollout.policies == "together" else [(policy,) for policy in self.trained_policies]

    def evaluation_compositions(self) -> list[tuple[str, ...]]:
        """The same of evaluation."""
        chosen = tuple(self.evaluation.policies)
        if self.rollout.policies == "apart":
            return [(policy,) for policy in chosen or self.trained_policies]
        return [chosen]

    def with_devices(self, *, has_gpu: bool, node: int | None = None) -> Recipe:
        """The same recipe with `auto` replaced in each device of the node (None: of all), and in the types that follow from
        it. Trainers belong to node 0."""
        tree = self.model_dump(mode="json")
        services = [service for service in tree["inference"].values() if node in (None, service["node"])]
        # not of one node: the others may find another device, and all must agree on the type of versions
        if node is None:
            for name, policy in tree["policies"].items():
                policy["weights"]["publish_dtype"] = self.policies[name].published_dtype
        for section in (*services, *(policy["trainer"] for policy in tree["policies"].values())):
            if section["device"] == "auto":
                section["device"] = "cuda" if has_gpu else "cpu"
        return Recipe.model_validate(tree)

    def nodes(self) -> list[int]:
        """The nodes of the recipe, 0 first."""
        named = {service.node for service in self.inference.values()}
        named |= {self.envgateway.node} if self.envgateway else set()
        return sorted(
            {0, *named, *(node for policy in self.trained_policies.values() for node in policy.trainer.nodes)}
        )

    def ports(self) -> list[tuple[str, int]]:
        """Every port of the recipe with its key, on all nodes; 0 takes a free one."""
        ports = [("orchestrator.port", self.orchestrator.port)]
        ports += [(f"inference.{name}.port", service.port) for name, service in self.inference.items()]
        ports += [
            (f"inference.{name}.endpoint.port", service.endpoint.port)
            for name, service in self.inference.items()
            if service.endpoint.port is not None
        ]
        if self.envgateway:
            ports.append(("envgateway.port", self.envgateway.port))
        for name, policy in self.trained_policies.items():
            ports.append((f"policies.{name}.trainer.port", policy.trainer.port))
            ports.append((f"policies.{name}.trainer.rendezvous_port", policy.trainer.rendezvous_port))
            ports.append((f"policies.{name}.weights.port", policy.weights.port))
        if self.metrics.enabled:
            ports += [(f"metrics.ports.{name}", port) for name, port in self.metrics.ports.items()]
        return ports

    def processes_with_metrics(self) -> list[str]:
        """Everything that serves metrics, by the names that `metrics.ports` knows."""
        trainers = [f"{kind}-{policy}" for policy in self.trained_policies for kind in ("trainer", "publisher")]
        inference = [f"inference-{name}" for name in self.inference]
        return ["orchestrator", *inference, *trainers, *(["envgateway", "worker"] if self.envgateway else [])]

    def optimizer(self, policy: str) -> OptimizerConfig:
        """The optimizer of a policy, its schedule spanning the whole run unless the recipe says otherwise."""
        section = self.policies[policy]
        if section.optimizer.total_updates is not None:
            return section.optimizer
        return section.optimizer.model_copy(update={"total_updates": self.run.steps * section.batch.minibatches})

    def numerics(self, policy: str) -> tuple[float, dict[str, str]]:
        """The largest mean difference of engines and trainer that rounding explains, in nats, and the types that decide it by
        their keys. Infinite for an engine without a model."""
        section, served = self.policies[policy], self.inference.items()
        serving = {name: service for name, service in served if not service.policies or policy in service.policies}
        types = {f"inference.{name}.dtype": str(service.dtype) for name, service in serving.items()}
        types |= {
            "weights.publish_dtype": section.published_dtype,
            "trainer.compute_dtype": section.trainer.compute_dtype,
        }
        engines = {service.engine for service in serving.values()}
        if "scripted" in engines:
            return math.inf, types
        # servers have kernels of their own
        exact = set(types.values()) == {"float32"} and engines <= {"torch", "forced"}
        return EXACT_MISMATCH if exact else ROUNDED_MISMATCH, types

    def digest_algorithm(self) -> Literal["xxh3-128", "blake3"]:
        """The digest algorithm of versions: xxh3-128, which detects accidental damage, if only this machine reaches the
        services of the run; else blake3, which also detects forged versions."""
        return "xxh3-128" if self.is_on_loopback else "blake3"

    @property
    def hosts(self) -> dict[str, str]:
        """Every bind address, by its path in the recipe."""
        found = {"orchestrator.host": self.orchestrator.host}
        found |= {f"inference.{name}.host": service.host for name, service in self.inference.items()}
        found |= {
            f"policies.{name}.weights.host": policy.weights.host for name, policy in self.trained_policies.items()
        }
        if self.envgateway:
            found["envgateway.host"] = self.envgateway.host
        return found

    @property
    def is_on_loopback(self) -> bool:
        """Whether only its own machine reaches any service of the run."""
        return all(map(is_loopback, self.hosts.values()))

    @property
    def needs_keys(self) -> bool:
        """Whether its services cannot, or shall not, do without keys."""
        return self.security.tls == "on" or not self.is_on_loopback

    @property
    def ready_timeout_s(self) -> float:
        """Until every process of the run is ready: servers have then loaded the models."""
        loads = any(service.servers is not None for service in self.inference.values())
        return self.launch.ready_timeout_s + (SERVER_START_S if loads else 0.0)

    def model_path(self, policy: str, run_dir: Path) -> str:
        """The path of a policy's starting checkpoint: its own, or the one that the warm start makes."""
        path = self.policies[policy].model.path
        return path if path is not None else str(warm_start_dir(run_dir, policy))


def warm_start_dir(run_dir: Path, policy: str) -> Path:
    """Where the warm start writes the starting checkpoint of a policy."""
    return run_dir / "warm_start" / policy

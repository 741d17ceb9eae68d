"""The recipe: everything a run needs, in one validated tree. No torch, no grpc: it loads in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from services.common.config.base import Section
from services.common.config.data import DataConfig, EvaluationConfig, SamplingConfig, WorkflowConfig
from services.common.config.deterministic import conflicts
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.optimizer import OptimizerConfig
from services.common.config.placement import check_placement
from services.common.config.policy import PolicyConfig
from services.common.config.security import SecurityConfig
from services.common.config.services import (
    InferenceConfig,
    LaunchConfig,
    MetricsConfig,
    OrchestratorConfig,
    RolloutConfig,
    WarmStartConfig,
)
from services.common.config.sglang import MASK_TOKENS
from services.common.loopback import is_loopback


class RunConfig(Section):
    id: str | None = None
    """Name of the run and of its directory, in one part: no `/`; left out, recipe name and time."""
    dir: str = "runs"
    """Directory that holds run directories."""
    seed: int = Field(default=1, ge=0)
    """Seeds data order, episodes, sampling, what is resampled and replayed, and initial weights (docs/workflows.md)."""
    steps: int = Field(default=100, ge=0)
    """Training steps of each policy, each one published version; 0 only evaluates, without trainers."""
    lockstep: bool = False
    """No policy begins a step before all have published the version before it. Otherwise trainers share no barrier."""
    deterministic: bool = False
    """The final weights are the same bits whenever recipe and starting checkpoint are the same, whatever dies meanwhile. Every
    rollout of a step plays the version before it, batches are made in the order in which task groups were issued, and an
    engine computes one request at a time: slower, for tests and for finding faults. Settings with which it cannot hold are
    refused. It holds on one kind of machine, with judges that give equal answers, while no rollout fails for good."""
    resume: Literal["auto", "never"] = "never"
    """`auto`: `millrace run RECIPE` goes on with the newest run of this name and these settings in `dir` that has not ended,
    and begins a new one where there is none. `never`: each is a new one. The option --resume goes before it."""

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
    """One run. Each key is documented under its field; `millrace check RECIPE` validates and prints it."""

    name: str
    """What the recipe is called."""
    description: str = ""
    """One line for people."""
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
    envgateway: EnvGatewayConfig | None = EnvGatewayConfig()
    """The environment gateway; null when the workflow needs none."""
    warm_start: dict[str, WarmStartConfig] = {}
    """By policy: supervised training that makes its starting checkpoint, before the run."""
    launch: LaunchConfig = LaunchConfig()
    """How processes are started and stopped."""
    security: SecurityConfig = SecurityConfig()
    """Who may reach the services."""
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

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        self._check_policies_are_served()
        self._check_trained()
        self._check_teachers()
        self._check_models()
        self._check_batches()
        self._check_ports()
        check_placement(self.inference, self.policies)
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: greedy rollouts of a group are all alike; write a value above 0"
            )
        self._check_sampling()
        self._check_evaluation()
        self._check_evaluation_fits()
        self._check_security()
        self._check_deterministic()
        return self

    def _check_deterministic(self) -> None:
        if self.run.deterministic and (found := conflicts(self.policies, self.workflow, self.data, self.inference)):
            raise ValueError(f"run.deterministic cannot hold: {'; '.join(found)}")

    def _check_sampling(self) -> None:
        cuts = self.sampling.cuts() if self.run.steps else []
        for name, service in self.inference.items():
            if cuts and not service.tells_kept_tokens:
                raise ValueError(
                    f"sampling has {', '.join(cuts)}, and the {service.engine} engine of inference.{name} does not tell which "
                    f"tokens that leaves to draw from, so what it samples cannot be trained: write inference.{name}.engine "
                    "torch or sglang, or top_p 1, top_k 0, min_p 0 and min_new_tokens 0 (evaluation.samplings may truncate)"
                )
            if service.engine == "sglang" and self.sampling.top_k > MASK_TOKENS:
                raise ValueError(
                    f"sampling.top_k is {self.sampling.top_k}, and the SGLang servers of inference.{name} tell of at most "
                    f"{MASK_TOKENS} tokens which could be drawn: write fewer, or 0 (off)"
                )

    def _check_security(self) -> None:
        away = [f"{where} is {host}" for where, host in self.hosts.items() if not is_loopback(host)]
        if self.security.tls == "off" and away:
            raise ValueError(
                f"security.tls is off, but {', '.join(away)}: only loopback may do without; write 127.0.0.1, or leave "
                "security.tls out"
            )
        gateway = self.envgateway
        if gateway is not None and gateway.node != 0 and not is_loopback(gateway.host):
            raise ValueError(
                f"envgateway.host is {gateway.host}, but on node {gateway.node} (envgateway.node) the gateway listens at the "
                "address of that node: leave host out, and set NODE_HOST there to choose an address"
            )
        if self.security.tls == "off" and len(nodes := self.nodes()) > 1:
            raise ValueError(
                f"security.tls is off, but the recipe has processes on nodes {', '.join(map(str, nodes))}, which reach each "
                "other over a network: leave security.tls out, or run everything on node 0"
            )

    def _check_evaluation(self) -> None:
        evaluation = self.evaluation
        if not self.data.evaluation and (evaluation.at_start or evaluation.at_end or evaluation.every):
            raise ValueError(
                "evaluation is on but data.evaluation is missing: name a dataset there, "
                "or set evaluation.at_start and evaluation.at_end to false and evaluation.every to 0"
            )
        for name, dataset in self.data.evaluation.items():
            if evaluation.max_in_flight is not None and evaluation.max_in_flight < (dataset.samples_per_task or 0):
                raise ValueError(
                    f"evaluation.max_in_flight {evaluation.max_in_flight} is below data.evaluation.{name}.samples_per_task "
                    f"{dataset.samples_per_task}: the trajectories of a task are issued together"
                )
        for policy in evaluation.policies:
            if policy not in self.policies:
                raise ValueError(
                    f"evaluation.policies names {policy!r}, which is no policy of this recipe; "
                    f"write one of {sorted(self.policies)}"
                )

    def _check_evaluation_fits(self) -> None:
        slots = max((service.num_slots for service in self.inference.values()), default=None)
        wanted = {"evaluation.samples_per_task": self.evaluation.samples_per_task} if self.data.evaluation else {}
        wanted |= {
            f"{where}.samples_per_task": config.samples_per_task
            for where, config in self.data.sections().items()
            if config.samples_per_task is not None
        }
        for key, samples in wanted.items():
            if slots is not None and samples > slots:
                raise ValueError(
                    f"{key} ({samples}) exceeds the num_slots of every inference service ({slots} at most): the samples "
                    "of a task are played by one replica"
                )

    def _check_policies_are_served(self) -> None:
        for name, service in self.inference.items():
            for policy in service.policies:
                if policy not in self.policies:
                    raise ValueError(
                        f"inference.{name}.policies names {policy!r}, which is no policy of this recipe; "
                        f"write one of {sorted(self.policies)}"
                    )
        for policy in self.policies:
            if not any(not s.policies or policy in s.policies for s in self.inference.values()):
                raise ValueError(f"no inference service serves policy {policy!r}: add it to inference.<name>.policies")
        whole = any(not s.policies or set(s.policies) == set(self.policies) for s in self.inference.values())
        if self.rollout.policies == "together" and not whole:
            raise ValueError(
                f"no inference service serves all of {sorted(self.policies)}, which play together in one rollout: "
                "leave inference.<name>.policies of one of them empty, or set rollout.policies to apart"
            )

    def _check_trained(self) -> None:
        if self.run.steps and not self.trained_policies:
            raise ValueError(
                f"run.steps is {self.run.steps}, but trained is false for each of {sorted(self.policies)}: leave it out of "
                "the policy to train, or set run.steps to 0"
            )

    def _check_teachers(self) -> None:
        for student, name in self.teachers.items():
            where = f"policies.{student}.algorithm.distillation.teacher"
            teacher = self.policies.get(name)
            if teacher is None:
                raise ValueError(
                    f"{where} is {name!r}, which is no policy of this recipe (it has {sorted(self.policies)}): add "
                    f"policies.{name} with trained: false, or name a model in teacher_model, which the trainer then loads"
                )
            if teacher.trained:
                raise ValueError(f"{where} is {name!r}, which is trained itself: write policies.{name}.trained: false")
            own = self.policies[student].model.context_length
            if teacher.model.context_length < own:
                raise ValueError(
                    f"policies.{name}.model.context_length ({teacher.model.context_length}) is below the {own} of {student}, "
                    f"whose sequences {name} scores: write {own}"
                )
            if cuts := self.sampling.cuts():
                raise ValueError(
                    f"sampling has {', '.join(cuts)}, and {where} scores tokens over the whole vocabulary: write top_p 1, "
                    "top_k 0, min_p 0 and min_new_tokens 0, or name the teacher's model in teacher_model instead"
                )
            self._check_teacher_is_served(student, name, where)

    def _check_teacher_is_served(self, student: str, teacher: str, where: str) -> None:
        for name, service in self.inference.items():
            if service.policies and student not in service.policies:
                continue
            if service.policies and teacher not in service.policies:
                raise ValueError(
                    f"inference.{name}.policies has {student!r} without its teacher {teacher!r} ({where}): add it, the "
                    "replica that plays a rollout scores it"
                )
            if service.engine == "sglang":
                raise ValueError(
                    f"{where} is {teacher!r}, and the sglang engine of inference.{name} cannot score tokens: write "
                    f"inference.{name}.engine torch, or name the teacher's model in teacher_model instead"
                )

    def _check_models(self) -> None:
        for name in self.warm_start:
            if name not in self.policies:
                raise ValueError(
                    f"warm_start.{name} is for no policy of this recipe; write one of {sorted(self.policies)}"
                )
        for name, policy in self.policies.items():
            if policy.model.path is None and name not in self.warm_start:
                others = ", ".join(other for other in self.policies if other != name)
                raise ValueError(
                    f"policies.{name}.model.path is missing: write a model directory or a hub name, or how to make it "
                    f"under warm_start.{name}"
                    + (f"; {name!r} is a policy of its own beside {others}" if others else "")
                )
            if self.sampling.max_new_tokens >= policy.model.context_length:
                raise ValueError(
                    f"sampling.max_new_tokens ({self.sampling.max_new_tokens}) leaves no room for a prompt in "
                    f"policies.{name}.model.context_length ({policy.model.context_length})"
                )

    def _check_batches(self) -> None:
        for name, policy in self.trained_policies.items():
            if policy.batch.minibatches > policy.batch.size:
                raise ValueError(
                    f"policies.{name}.batch.minibatches ({policy.batch.minibatches}) exceeds batch.size "
                    f"({policy.batch.size}): a minibatch needs at least one sequence"
                )
            resample = policy.batch.resample
            if resample is not None and resample.keep > self.rollout.group_size:
                raise ValueError(
                    f"policies.{name}.batch.resample.keep ({resample.keep}) exceeds rollout.group_size "
                    f"({self.rollout.group_size}): there is nothing to leave out"
                )
            pass_k = policy.algorithm.pass_k
            if pass_k is not None and pass_k > self.rollout.group_size:
                raise ValueError(
                    f"policies.{name}.algorithm.pass_k ({pass_k}) exceeds rollout.group_size ({self.rollout.group_size}): no group "
                    "has as many rollouts"
                )
            for key, reward in (
                ("timeout_reward", self.rollout.timeout_reward), ("truncation_reward", self.rollout.truncation_reward),
            ):  # fmt: skip
                if reward is not None and not policy.algorithm.takes_reward(reward):
                    raise ValueError(
                        f"rollout.{key} is {reward:g}, and policies.{name}.algorithm.advantage: {policy.algorithm.advantage} "
                        f"needs rewards {policy.algorithm.reward_range}: write such a one, or leave {key} out"
                    )
            if policy.batch.dynamic_sampling and self.rollout.group_size == 1:
                raise ValueError(
                    f"policies.{name}.batch.dynamic_sampling drops every group when rollout.group_size is 1: "
                    "set dynamic_sampling to false, or group_size to 2 or more"
                )

    def _check_ports(self) -> None:
        ports: dict[int, str] = {}
        for where, port in self.ports():
            if port and port in ports:
                raise ValueError(f"{where} and {ports[port]} are both {port}: give one of them another port")
            ports[port] = where
        for name in self.metrics.ports:
            if name not in self.processes_with_metrics():
                raise ValueError(
                    f"metrics.ports names {name!r}, which is no process of this recipe; write one of "
                    f"{', '.join(self.processes_with_metrics())}"
                )

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

    def compositions(self) -> list[tuple[str, ...]]:
        """The policies of one training rollout, for each kind of rollout there is; () is all that play."""
        return [()] if self.rollout.policies == "together" else [(policy,) for policy in self.trained_policies]

    def evaluation_compositions(self) -> list[tuple[str, ...]]:
        """The same of evaluation."""
        chosen = tuple(self.evaluation.policies)
        if self.rollout.policies == "apart":
            return [(policy,) for policy in chosen or self.trained_policies]
        return [chosen]

    def nodes(self) -> list[int]:
        """The nodes that it names, 0 first."""
        named = {service.node for service in self.inference.values()}
        named |= {self.envgateway.node} if self.envgateway else set()
        return sorted(
            {0, *named, *(node for policy in self.trained_policies.values() for node in policy.trainer.nodes)}
        )

    def ports(self) -> list[tuple[str, int]]:
        """Every port of the recipe with the key that sets it, whatever the node; 0 takes a free one."""
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

    def digest_algorithm(self, policy: str) -> Literal["xxh3-128", "blake3"]:
        """With what versions of a policy are digested; trainer and replicas must agree.

        `auto` is xxh3-128, which finds accidents, as long as nobody but this machine reaches any service of the run;
        else blake3, which also withstands somebody who forges a version.
        """
        chosen = self.policies[policy].weights.digest
        if chosen != "auto":
            return chosen
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
        """Until every process of the run is ready: with SGLang, when its servers have loaded the models."""
        loading = [s.sglang.ready_timeout_s for s in self.inference.values() if s.engine == "sglang"]
        return self.launch.ready_timeout_s + max(loading, default=0.0)

    def model_path(self, policy: str, run_dir: Path) -> str:
        """Where the starting checkpoint of a policy lies: its own path, or what the warm start makes."""
        path = self.policies[policy].model.path
        return path if path is not None else str(warm_start_dir(run_dir, policy))


def warm_start_dir(run_dir: Path, policy: str) -> Path:
    """Where the warm start writes the starting checkpoint of a policy."""
    return run_dir / "warm_start" / policy

"""Settings of the processes of a run."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from services.common.config.base import (
    HttpService,
    Listening,
    OnDevice,
    OnNode,
    Port,
    Section,
    refuse_unread,
    with_device,
)
from services.common.config.training import PolicyConfig
from services.common.extras import provided
from services.common.installing import install, missing

# --- Settings of engines that are servers: SGLang's and vLLM's. The context length is the policy's
# `model.context_length`.


SERVER_START_S = 600.0  # an engine that does not answer after this long, and the time to load its weights, has failed
LOADED_BYTES_PER_S = 1e8  # of a slow disk
MASK_TOKENS = 1024  # of a cut distribution, how many tokens a server can list at most; it is started with this


class ServersConfig(Section):
    """The settings that SGLang and vLLM share."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    memory_share: float = Field(default=0.8, gt=0, lt=1)
    """Share of each GPU's memory for weights and KV cache together (SGLang's `mem_fraction_static`, vLLM's `gpu_memory_utilization`)."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; left out, as many as the service has slots and its KV cache holds."""
    python: str | None = None
    """Interpreter of the environment that holds the engine's package. Variable: ROLLMILL_SGLANG_PYTHON,
    ROLLMILL_VLLM_PYTHON. Left out: that of `make sglang-env` or `make vllm-env` (on a CPU `-cpu-env`), else the service's own."""
    extra_arguments: dict[str, str | int | float | bool] = {}
    """More arguments of the engine, by their names in SGLang's `ServerArgs` or vLLM's `AsyncEngineArgs`."""


class SglangConfig(ServersConfig):
    update: Literal["disk", "tensors"] = "disk"
    """How weights reach the engines: `disk` through a file, in shared memory where there is room; `tensors` in the
    memory of their GPUs (CUDA IPC, no GPU has tried it; up to 1 GiB of each GPU and a CUDA context more), or in shared memory on a CPU."""


class VllmConfig(ServersConfig):
    """vLLM has the shared settings only."""


OutcomeRule = Literal["penalise", "mask", "as_scored"]  # what a rollout is that was not played to its end


class RolloutConfig(Section):
    group_size: int = Field(default=8, ge=1)
    """Trajectories per task issue: a task group."""
    policies: Literal["together", "apart"] = "together"
    """`together`: a rollout may use every policy of the recipe. `apart`: each task group is played by one policy alone, in
    turn, so that several learn the same thing side by side, each at its own speed."""
    admit: Literal["all", "any"] = "all"
    """When a rollout that trains several policies may start: when each has room for its sequences, or when one has;
    then sequences without room are dropped (`sequences_surplus`)."""
    timeout_s: float = Field(default=600.0, gt=0)
    """A rollout that takes longer is ended. Where the policy alone was slow (no part was repeated, and only a
    generation was awaited at the end), `on_timeout` sets the cost; else the rollout is a failure without cost."""
    on_timeout: OutcomeRule = "penalise"
    """Treatment of a rollout that ran out of time, in training and in evaluation. `penalise`: a member of its group's
    statistics with the reward `timeout_reward`, though none of its tokens is trained. `mask` is the same while a
    timeout keeps no tokens. `as_scored`: the workflow gave no score, so the rollout is a failure: in no statistics, and
    in evaluation `evaluation.failed_reward`."""
    timeout_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Reward of a rollout that ran out of time. Left out: 0, or the lowest reward of its group if lower, so that a
    timeout never beats a scored rollout."""
    on_truncation: OutcomeRule = "as_scored"
    """Treatment of a sequence that ended because its token budget or the context ran out (stop reason `length`).
    `penalise`: its reward is `truncation_reward`. `mask`: its reward counts in its group's statistics, its tokens are
    not trained (DAPO's overlong filtering). `as_scored`: as any other. In evaluation `penalise` holds for a rollout
    whose last sequence ended so."""
    truncation_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """With `on_truncation: penalise`. Left out: 0, or the lowest reward of its group if lower."""
    infra_retries: int = Field(default=2, ge=0)
    """Repetitions of a rollout after infrastructure failures, before the rollout counts as failed."""
    max_masked_share: float = Field(default=0.25, gt=0, le=1)
    """Largest share of a policy's newest training rollouts that may have no reward because machinery failed (a grader,
    a peer, a full gateway). Above the share the run is paused with the reason: a policy can provoke such repetitions. 1
    is off."""

    @model_validator(mode="after")
    def _rewards_are_used(self) -> RolloutConfig:
        refuse_unread(self, "on_timeout", {"timeout_reward": ("penalise", "mask")})
        refuse_unread(self, "on_truncation", {"truncation_reward": ("penalise",)})
        return self


class OrchestratorConfig(Listening):
    port: Port = 50050
    """gRPC port; 0 takes a free one. Variable: ORCHESTRATOR_PORT."""
    lease_s: float = Field(default=30.0, gt=0)
    """A replica or trainer that does not report for this long has left."""
    durability: Literal["process", "power"] = "process"
    """`process`: acknowledged data survives kill -9. `power`: also a power cut (fsync)."""
    retention: Literal["needed", "all"] = "needed"
    """`needed` keeps the trajectories that are still to be trained, and those that a replay from the oldest checkpoint which
    a trainer keeps needs; others are deleted, 64 MiB at a time. `all` keeps every trajectory: at least
    6 bytes per token. Batches, versions, evaluations and metrics stay for ever with both (docs/journal.md)."""
    min_free_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """Below this much free disk no new task group is issued, and the run reports the reason."""


class ScriptedEngineConfig(Section):
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Tokens per second of one request; 0 is as fast as possible."""
    script: str | None = None
    """Import path of a function from a generation request to token ids; left out, seeded random tokens."""
    latency_s: float = Field(default=0.0, ge=0)
    """Added to each generation."""


class ForcedEngineConfig(Section):
    script: str | None = None
    """The texts of the policies: a built-in workflow's name, or the import path of a function from a cue
    (`rollmill.Cue`) to text. Left out, the built-in one of the recipe's workflow."""
    right_share: float = Field(default=0.5, ge=0, le=1)
    """Share of rollouts in which the built-in scripts give the reference answer or the expert's actions."""


class EndpointConfig(HttpService):
    """The OpenAI-compatible endpoint for agents."""


ENGINES = ("torch", "forced", "scripted", "sglang", "vllm")


def _known_engine(name: str) -> str:
    if name in ENGINES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return name
    raise ValueError(
        f"no engine {name!r}; write one of {', '.join(ENGINES)}, or an import path such as my_engine:Engine"
    )


class InferenceConfig(Listening, OnNode, OnDevice):
    port: Port = 50061
    """gRPC port; 0 takes a free one."""
    engine: Annotated[str, AfterValidator(_known_engine)] = "torch"
    """`torch`: embedded, CPU or one GPU. `forced`: the replay engine, which emits the tokens of a script instead of
    sampling, for trying a recipe without a trained model. `scripted`: no model, for tests and simulations. `sglang`,
    `vllm`: servers on many GPUs. Any other by the import path of its class, such as `my_engine:Engine`
    (`rollmill.Engine`)."""
    engine_settings: dict[str, Any] = {}
    """`setup.settings` of an engine that is named by import path."""
    policies: list[str] = []
    """Policies that this service serves; empty means all."""
    num_slots: int = Field(default=64, ge=1)
    """Rollouts played at once."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """After a swap: recompute the KV cache (exact) or keep the cache (segments are marked `mixed_cache`)."""
    kv_cache_gib: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Memory for the KV cache of each embedded engine (`torch`, `forced`), of which it takes as much as its slots can fill.
    Where that is less than all slots at the full context, requests wait for memory, and the longest sequence must fit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the engine computes. `auto` is bfloat16 on a GPU, and float32 on a CPU."""
    stepping: Literal["eager", "graph", "compiled"] = "graph"
    """Decoding steps of an embedded engine on a GPU: `graph` replays CUDA graphs, `compiled` generates fused kernels with
    torch.compile before (needs a C++ compiler, and a minute at the first step), `eager` calls each kernel. On a CPU: `eager`."""
    engines: dict[str, Annotated[int, Field(ge=1)]] = {}
    """With `sglang` or `vllm`, engines of each policy (data parallel); left out, all GPUs are the only policy's."""
    scripted: ScriptedEngineConfig = ScriptedEngineConfig()
    """Settings of the scripted engine."""
    forced: ForcedEngineConfig = ForcedEngineConfig()
    """Settings of the replay engine (`engine: forced`)."""
    sglang: SglangConfig = SglangConfig()
    """Settings of the SGLang engines."""
    vllm: VllmConfig = VllmConfig()
    """Settings of the vLLM engines."""
    endpoint: EndpointConfig = EndpointConfig()
    """The OpenAI-compatible endpoint, for the workflow `external_agent`."""

    @model_validator(mode="before")
    @classmethod
    def _by_device(cls, written: Any) -> Any:
        return with_device(written, {"dtype": "bfloat16"}, {"dtype": "float32"})

    @property
    def servers(self) -> ServersConfig | None:
        """The settings of the engine's servers; None for an engine inside the service."""
        return {"sglang": self.sglang, "vllm": self.vllm}.get(self.engine)

    @property
    def tells_kept_tokens(self) -> bool:
        """Whether the engine says which tokens a truncated sampling could draw, without which its samples are not trained."""
        return self.engine in ENGINES and self.engine != "scripted"

    @model_validator(mode="after")
    def _settings_are_used(self) -> InferenceConfig:
        if self.engine_settings and self.engine in ENGINES:
            raise ValueError(
                f"engine_settings are for an engine that is named by import path, and engine is {self.engine}: write "
                f"`{self.engine}:` settings, or leave engine_settings out"
            )
        return self


class WarmStartConfig(Section):
    builder: str
    """Import path of `build(directory: Path, seed: int, **settings) -> None`: writes model and tokenizer as a
    Hugging Face directory."""
    builder_settings: dict[str, Any] = {}
    """Keyword arguments of the builder."""
    dialogues: str | None = None
    """Import path of a generator of dialogues (`{"messages": [{"role", "content"}, ...]}`), called with `seed` and
    `dialogue_settings`; or a jsonl file of such rows. Needed unless `steps` is 0."""
    dialogue_settings: dict[str, Any] = {}
    """Keyword arguments of the generator."""
    steps: int = Field(default=120, ge=0)
    """Optimizer updates; 0 leaves the built model unchanged."""
    batch_size: int = Field(default=192, ge=1)
    """Dialogues per update."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak of a cosine schedule."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the updates over which the learning rate rises to its peak in a line."""

    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW."""

    @model_validator(mode="after")
    def _dialogues_to_train_on(self) -> WarmStartConfig:
        if self.steps and self.dialogues is None:
            raise ValueError("dialogues is missing: name a generator or a jsonl file, or set steps to 0")
        return self


class LaunchConfig(Section):
    ready_timeout_s: float = Field(default=180.0, gt=0)
    """A process that is not healthy after this long stops the launch, with its last log lines."""
    restarts: int = Field(default=3, ge=0)
    """Restarts in a row of a process that was killed by a signal or lost a required peer or resource; one
    that has lived for ten minutes begins anew."""
    stop_grace_s: float = Field(default=20.0, gt=0)
    """A process that does not stop by itself within this is killed."""
    gpu_memory_gib: float = Field(default=80.0, gt=0)
    """Memory of each GPU. `rollmill check` and `rollmill run` refuse a layout that cannot fit."""
    chosen_ports: list[str] = []
    """Written by the launch: the settings whose port 0 it replaced with a free port. A run on one machine that goes on takes
    another port in place of one of these that another program holds by then."""


class MetricsConfig(Section):
    enabled: bool = False
    """Every process serves `/metrics` for Prometheus over HTTP, and writes where into RUN/prometheus."""
    ports: dict[str, Port] = {}
    """Ports by process (orchestrator, inference-NAME, trainer-POLICY, publisher-POLICY, envgateway, worker); a process
    without a port takes a free one."""


# --- The sizes of an embedded engine's KV cache, for the engine and for `rollmill check`.


BLOCK_TOKENS = 32
"""Positions of a block. On average a row leaves half of its last block empty; a gather of larger blocks is faster."""
RESERVED_BLOCKS = 2  # one of zeros, one for the values of padding


def blocks_of(num_positions: int) -> int:
    return -(-num_positions // BLOCK_TOKENS)


def least_blocks(context_length: int) -> int:
    """Blocks with which one sequence can reach the end of the context: then every request ends, one after another."""
    return blocks_of(context_length) + RESERVED_BLOCKS


def cache_bytes(limit_bytes: float, num_slots: int, context_length: int, token_bytes: int) -> int:
    """Bytes of the cache: as many as all slots can fill, at most ``limit_bytes``. ``token_bytes``: over all layers."""
    return int(min(limit_bytes, num_slots * context_length * token_bytes))


def too_small(limit_bytes: float, context_length: int, token_bytes: int) -> str | None:
    """The sentence that refuses a limit under which no sequence could reach the end of the context; None if it fits."""
    needed = least_blocks(context_length) * BLOCK_TOKENS * token_bytes
    if needed <= limit_bytes:
        return None
    return (
        f"kv_cache_gib is {limit_bytes / (1 << 30):.3g}, and one sequence of {context_length} tokens needs "
        f"{needed / (1 << 30):.3g}: raise kv_cache_gib to at least {needed * 1.0005 / (1 << 30):.3g}, or lower "
        "policies.*.model.context_length"
    )


# --- Assigns devices of nodes to the processes of a recipe, and checks the assignment.


SHARED_ENGINES = ("torch", "forced", "scripted")  # which free their memory on request


class Placement(enum.StrEnum):
    """Devices of rollouts and training."""

    AUTO = "auto"  # ``shared`` on a machine with one GPU where no section names GPUs, else ``apart``
    APART = "apart"  # each has its own, and both compute at the same time
    SHARED = "shared"  # both have the same, and take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClaim:
    """GPUs that one process gets for itself."""

    where: str  # the key that says so
    node: int
    gpus: tuple[int, ...]


def gpu_claims(inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig]) -> list[GpuClaim]:
    """Every section that names GPUs; a trainer takes them on each of its nodes."""
    claims = [
        GpuClaim(where=f"inference.{name}.gpus", node=service.node, gpus=tuple(service.gpus))
        for name, service in inference.items()
    ]
    claims += [
        GpuClaim(where=f"policies.{name}.trainer.gpus", node=node, gpus=tuple(policy.trainer.gpus))
        for name, policy in policies.items()
        if policy.trained
        for node in policy.trainer.nodes
    ]
    return [claim for claim in claims if claim.gpus]


def engine_numbers(service: InferenceConfig, served: Sequence[str]) -> dict[str, int]:
    """Engines of each policy that a service serves: its own numbers, else all GPUs for its only policy, else one each."""
    if service.engines:
        return dict(service.engines)
    if service.gpus and len(served) == 1:
        return {served[0]: len(service.gpus) // (service.servers.tensor_parallel if service.servers else 1)}
    return dict.fromkeys(served, 1)


def check_placement(
    inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig], placement: Placement
) -> None:
    """Raise ``ValueError`` that names the key and the value to write."""
    for claim in gpu_claims(inference, policies):
        if len(set(claim.gpus)) != len(claim.gpus):
            raise ValueError(f"{claim.where} {list(claim.gpus)} names a GPU twice")
    for name, service in inference.items():
        _check_service(f"inference.{name}", service, service.policies or list(policies))
    for name, policy in policies.items():
        if policy.trained:
            _check_trainer(f"policies.{name}.trainer", policy)
    if placement is Placement.SHARED:
        _check_shared(inference, policies)
        return
    holders: dict[tuple[int, int], str] = {}
    for claim in gpu_claims(inference, policies):
        for gpu in claim.gpus:
            other = holders.setdefault((claim.node, gpu), claim.where)
            if other != claim.where:
                raise ValueError(
                    f"{claim.where} and {other} both take GPU {gpu} of node {claim.node}: "
                    "give one of them others, or let them take turns with placement: shared"
                )


def _check_shared(inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig]) -> None:
    nodes = {f"inference.{name}.node": [service.node] for name, service in inference.items()}
    nodes |= {f"policies.{name}.trainer.nodes": policy.trainer.nodes for name, policy in policies.items()}
    for where, named in nodes.items():
        if list(named) != [0]:
            raise ValueError(
                f"placement is shared, and {where} is {named if len(named) > 1 else named[0]}: the devices that take turns "
                "are those of node 0, so leave it out, or write placement: apart"
            )
    for name, service in inference.items():
        if service.engine not in SHARED_ENGINES:
            raise ValueError(
                f"placement is shared, and inference.{name}.engine is {service.engine}, which does not free its memory "
                f"between turns: write {SHARED_ENGINES[0]}, or placement: apart"
            )


def _check_service(where: str, service: InferenceConfig, served: Sequence[str]) -> None:
    for policy in service.engines:
        if policy not in served:
            raise ValueError(
                f"{where}.engines names {policy!r}, which {where} does not serve; write one of {list(served)}"
            )
    if service.engines and (missing := [policy for policy in served if policy not in service.engines]):
        raise ValueError(f"{where}.engines leaves out {', '.join(missing)}: write how many engines each policy gets")
    if service.servers is None:
        _check_embedded(where, service)
        return
    parallel, numbers = service.servers.tensor_parallel, engine_numbers(service, served)
    needed = max(1, sum(numbers.values())) * parallel
    if service.gpus and needed != len(service.gpus):
        filling = max(1, len(service.gpus) // parallel // len(served))
        other = ", ".join(f"{policy}: {filling}" for policy in served)
        shown = ", ".join(f"{policy}: {number}" for policy, number in numbers.items())
        raise ValueError(
            f"{where}: engines {{{shown}}} of {parallel} GPUs ({where}.{service.engine}.tensor_parallel) take {needed} GPUs, "
            f"but {where}.gpus has {len(service.gpus)}: write {needed} GPUs there, or numbers such as {where}.engines: {{{other}}}"
        )


def _check_embedded(where: str, service: InferenceConfig) -> None:
    """Engines inside the service: one for each policy, all on one device."""
    if any(number > 1 for number in service.engines.values()):
        raise ValueError(
            f"{where}.engines: engine {service.engine} is one per policy; write 1, or {where}.engine: sglang"
        )
    if service.gpus and (service.engine == "scripted" or service.device == "cpu"):
        raise ValueError(f"{where}.gpus is {service.gpus}, but this service uses no GPU: leave gpus out")
    if len(service.gpus) > 1 and ":" not in service.engine:
        raise ValueError(
            f"{where}.gpus has {len(service.gpus)} GPUs, but engine {service.engine} uses one: write one, "
            f"or {where}.engine: sglang"
        )


def _check_trainer(where: str, policy: PolicyConfig) -> None:
    trainer = policy.trainer
    _check_nodes(where, policy)
    if not trainer.gpus:
        return
    if trainer.device == "cpu":
        raise ValueError(f"{where}.gpus is {trainer.gpus}, but {where}.device is cpu: leave one of them out")
    held = len(trainer.gpus) * len(trainer.nodes)
    if held != trainer.num_ranks:
        on = f" on each of {len(trainer.nodes)} nodes" if len(trainer.nodes) > 1 else ""
        raise ValueError(
            f"{where}.gpus has {len(trainer.gpus)} GPUs{on} for {trainer.num_ranks} ranks, which have one each: "
            f"write {where}.num_ranks: {held}, or {trainer.num_ranks // len(trainer.nodes)} GPUs"
        )


def _check_nodes(where: str, policy: PolicyConfig) -> None:
    trainer = policy.trainer
    num_nodes = len(trainer.nodes)
    if trainer.nodes[0] != 0 or len(set(trainer.nodes)) != num_nodes:
        raise ValueError(
            f"{where}.nodes is {trainer.nodes}: the first rank, which publishes, is on node 0; "
            "write 0 first and no node twice"
        )
    if num_nodes == 1:
        return
    if trainer.num_ranks % num_nodes:
        raise ValueError(
            f"{where}.num_ranks is {trainer.num_ranks}, which {num_nodes} nodes ({where}.nodes) cannot share evenly: "
            f"write a multiple of {num_nodes}"
        )
    if not trainer.rendezvous_port:
        raise ValueError(
            f"{where}.rendezvous_port is 0, a free port, which other nodes cannot know: write a number, such as 29541"
        )
    if not trainer.interface:
        raise ValueError(
            f"{where}.interface is missing: ranks on several nodes exchange gradients unencrypted, so name the network "
            "interface of a private network between them, such as eth1"
        )


# --- The trackers that a run can send its metrics to, and the package that each needs.


class Tracker(enum.StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    OTLP = "otlp"


def missing_packages(trackers: Iterable[Tracker]) -> list[str]:
    """One line for each tracker whose extra or package is not installed, with the remedy."""
    lines = []
    for tracker in trackers:
        if tracker is Tracker.TENSORBOARD:  # whose files Rollmill writes itself
            continue
        if tracker not in provided("trackers"):
            lines.append(f"run.trackers has {tracker}, whose extra (extras/trackers) is not here: leave {tracker} out")
        elif missing(tracker):
            lines.append(
                f"run.trackers has {tracker}, whose package is not installed here: {install(tracker)}, or leave {tracker} out"
            )
    return lines

"""Settings of the processes of a run."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from services.common.config.base import Section, with_device
from services.common.config.processes.servers import ServersConfig, SglangConfig, VllmConfig

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
    timeout_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout that ran out of time. Left out: 0, or the lowest reward of its group if lower, so that a
    timeout never beats a scored rollout."""
    on_truncation: OutcomeRule = "as_scored"
    """Treatment of a sequence that ended because its token budget or the context ran out (stop reason `length`).
    `penalise`: its reward is `truncation_reward`. `mask`: its reward counts in its group's statistics, its tokens are
    not trained (DAPO's overlong filtering). `as_scored`: as any other. In evaluation `penalise` holds for a rollout
    whose last sequence ended so."""
    truncation_reward: float | None = Field(default=None, allow_inf_nan=False)
    """With `on_truncation: penalise`. Left out: 0, or the lowest reward of its group if lower."""
    infra_retries: int = Field(default=2, ge=0)
    """Repetitions of a rollout after infrastructure failures, before the rollout counts as failed."""
    max_masked_share: float = Field(default=0.25, gt=0, le=1)
    """Largest share of a policy's newest training rollouts that may have no reward because machinery failed (a grader,
    a peer, a full gateway). Above the share the run is paused with the reason: a policy can provoke such repetitions. 1
    is off."""
    masked_window: int = Field(default=512, ge=8)
    """Rollouts over which `max_masked_share` is taken; the check begins when half of them have ended."""
    timing: bool = True
    """Keep the timed phases of the rollout with each record, for `rollmill trace`."""

    @model_validator(mode="after")
    def _rewards_are_used(self) -> RolloutConfig:
        if self.timeout_reward is not None and self.on_timeout == "as_scored":
            raise ValueError(
                f"timeout_reward is {self.timeout_reward:g}, and on_timeout as_scored gives none: leave timeout_reward "
                "out, or write on_timeout: penalise"
            )
        if self.truncation_reward is not None and self.on_truncation != "penalise":
            raise ValueError(
                f"truncation_reward is {self.truncation_reward:g}, and on_truncation {self.on_truncation} gives none: leave "
                "truncation_reward out, or write on_truncation: penalise"
            )
        return self


class OrchestratorConfig(Section):
    host: str = "127.0.0.1"
    """Bind address. Another than loopback needs keys (`rollmill keys`, docs/security.md)."""
    port: int = Field(default=50050, ge=0, le=65535)
    """gRPC port; 0 takes a free one. Variable: ORCHESTRATOR_PORT."""
    lease_s: float = Field(default=30.0, gt=0)
    """A replica or trainer that does not report for this long has left."""
    durability: Literal["process", "power"] = "process"
    """`process`: acknowledged data survives kill -9. `power`: also a power cut (fsync)."""
    segment_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Journal segments are rolled at this size."""
    retention: Literal["needed", "all"] = "needed"
    """`needed` keeps the trajectories that are still to be trained, and those that a replay from the oldest checkpoint which
    a trainer keeps needs; others are deleted, 64 MiB (`segment_bytes`) at a time. `all` keeps every trajectory: at least
    6 bytes per token. Batches, versions, evaluations and metrics stay for ever with both (docs/journal.md)."""
    min_free_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """Below this much free disk no new task group is issued, and the run reports the reason."""


class ScriptedEngineConfig(Section):
    script: str | None = None
    """Import path of a function from a generation request to token ids; left out, seeded random tokens."""
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Tokens per second of one request; 0 is as fast as possible."""
    latency_s: float = Field(default=0.0, ge=0)
    """Added to each generation."""
    response_tokens: int = Field(default=64, ge=1)
    """Length of a random response."""
    vocabulary: int = Field(default=256, ge=2)
    """Random token ids lie below this."""


class ForcedEngineConfig(Section):
    script: str | None = None
    """The texts of the policies: a built-in workflow's name, or the import path of a function from a cue
    (`rollmill.Cue`) to text. Left out, the built-in one of the recipe's workflow."""
    right_share: float = Field(default=0.5, ge=0, le=1)
    """Share of rollouts in which the built-in scripts give the reference answer or the expert's actions."""
    num_words: int = Field(default=8, ge=0)
    """Meaningless words before an answer, different in each rollout; none where `reward` is a function of the recipe's."""
    seed: int = 0
    """Seeds the script together with `run.seed`."""


class EndpointConfig(Section):
    port: int | None = Field(default=None, ge=0, le=65535)
    """HTTP port of the endpoint for agents, at the host of its service; 0 takes a free one, null serves none."""
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """A larger request is refused."""
    tool_result_chars: int = Field(default=262_144, ge=64)
    """A longer result of an agent's tool is cut in its middle; the policy reads the rest and a mark."""


ENGINES = ("torch", "forced", "scripted", "sglang", "vllm")


def _known_engine(name: str) -> str:
    if name in ENGINES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return name
    raise ValueError(
        f"no engine {name!r}; write one of {', '.join(ENGINES)}, or an import path such as my_engine:Engine"
    )


class InferenceConfig(Section):
    host: str = "127.0.0.1"
    """Bind address. Another than loopback needs keys (`rollmill keys`, docs/security.md)."""
    port: int = Field(default=50061, ge=0, le=65535)
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
    engine_slots: int | None = Field(default=None, ge=1)
    """Requests generated at once by each engine; left out, as many as `num_slots`."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """After a swap: recompute the KV cache (exact) or keep the cache (segments are marked `mixed_cache`)."""
    kv_cache_gib: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Memory for the KV cache of each embedded engine (`torch`, `forced`), of which it takes as much as its slots can fill.
    Where that is less than all slots at the full context, requests wait for memory, and the longest sequence must fit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one. With `gpus` it is `cuda`: such a service never falls back to the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the engine computes. `auto` is bfloat16 on a GPU, and float32 on a CPU."""
    threads: int = Field(default=1, ge=1)
    """Threads on a CPU: of torch's operations, and of the compiled step of a small model, which share its rows."""
    stepping: Literal["eager", "graph", "compiled"] = "graph"
    """Decoding steps of an embedded engine on a GPU: `graph` replays CUDA graphs, `compiled` generates fused kernels with
    torch.compile before (needs a C++ compiler, and a minute at the first step), `eager` calls each kernel. On a CPU: `eager`."""
    node: int = Field(default=0, ge=0)
    """The node of this service. `rollmill run` starts the processes of node 0 and prints the commands for the others."""
    gpus: list[Annotated[int, Field(ge=0)]] = []
    """GPUs of its node for its exclusive use, counted among those that CUDA_VISIBLE_DEVICES shows; empty: all of these.
    Variable: INFERENCE_<NAME>_GPUS."""
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
    fork: bool = True
    """Fork trainers (of one rank) and replicas on a CPU with one thread from one process that has imported torch: they start,
    and start again after a kill, without five seconds of importing, and share its memory."""
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
    ports: dict[str, Annotated[int, Field(ge=0, le=65535)]] = {}
    """Ports by process (orchestrator, inference-NAME, trainer-POLICY, publisher-POLICY, envgateway, worker); a process
    without a port takes a free one."""

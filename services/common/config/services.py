"""Settings of the processes of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.config.sglang import SglangConfig

OutcomeRule = Literal["penalise", "mask", "as_scored"]  # what a rollout is that was not played to its end


class RolloutConfig(Section):
    group_size: int = Field(default=8, ge=1)
    """Trajectories per task issue: a task group."""
    policies: Literal["together", "apart"] = "together"
    """`together`: a rollout may use every policy of the recipe. `apart`: each task group is played by one policy alone, in
    turn, so that several learn the same thing side by side, each at its own speed."""
    admit: Literal["all", "any"] = "all"
    """When a rollout that trains several policies may start: when each has room for what it brings, or when one has; then
    what the others cannot use is dropped (`sequences_surplus`)."""
    timeout_s: float = Field(default=600.0, gt=0)
    """A rollout that takes longer is ended. Where the policy alone was slow (nothing was played again, and at the end a
    generation was all that was waited for), `on_timeout` says what that costs; else it is a failure, which costs nothing."""
    on_timeout: OutcomeRule = "penalise"
    """What a rollout that ran out of time is, in training and in evaluation. `penalise`: a member of its group's statistics
    with the reward `timeout_reward`, though no token of it is kept to be trained. `mask` is the same as long as it has no
    tokens. `as_scored`: the workflow scored nothing, so it is a failure: in no statistics, and in evaluation
    `evaluation.failed_reward`."""
    timeout_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout that ran out of time. Left out: 0, or the lowest reward that it is compared with where that is
    lower, so that it never beats a rollout that was scored."""
    on_truncation: OutcomeRule = "as_scored"
    """What a sequence is that ended because its token budget or the context ran out (stop reason `length`). `penalise`: its
    reward is `truncation_reward`. `mask`: its reward counts in its group's statistics, its tokens are not trained (DAPO's
    overlong filtering). `as_scored`: as any other. In evaluation `penalise` holds for a rollout whose last sequence ended
    so."""
    truncation_reward: float | None = Field(default=None, allow_inf_nan=False)
    """With `on_truncation: penalise`. Left out: 0, or the lowest reward that it is compared with where that is lower."""
    infra_retries: int = Field(default=2, ge=0)
    """Times that a rollout is played again after an infrastructure failure, before it is a failure."""
    max_masked_share: float = Field(default=0.25, gt=0, le=1)
    """Largest share of a policy's newest training rollouts that may have no reward because machinery failed (a grader, a
    peer, a full gateway). Above it the run is paused with the reason: what a policy can provoke is another try. 1 is off."""
    masked_window: int = Field(default=512, ge=8)
    """Rollouts over which `max_masked_share` is taken; nothing is said before half of them have ended."""
    timing: bool = True
    """Keep with each record what its rollout did and when, for `millrace trace`."""

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
    """Bind address. Another than loopback needs keys (`millrace keys`, docs/security.md)."""
    port: int = Field(default=50050, ge=0, le=65535)
    """gRPC port; 0 takes a free one. Variable: ORCHESTRATOR_PORT."""
    lease_s: float = Field(default=30.0, gt=0)
    """A replica or trainer that does not report for this long has left."""
    durability: Literal["process", "power"] = "process"
    """`process`: what is acknowledged survives kill -9. `power`: also a power cut (fsync)."""
    segment_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Journal segments are rolled at this size."""
    retention: Literal["needed", "all"] = "needed"
    """`needed` keeps the trajectories that are still to be trained, and those that a replay from the oldest checkpoint which
    a trainer keeps needs; others are deleted, 64 MiB (`segment_bytes`) at a time. `all` keeps every trajectory: at least
    6 bytes per token. Batches, versions, evaluations and metrics stay for ever with both (docs/journal.md)."""
    min_free_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """Below this much free disk nothing new is issued, and the run says so."""


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
    """What the policies say: a built-in workflow's name, or the import path of a function from a cue
    (`services.inference.scripts.base.Cue`) to text. Left out, the built-in one of the recipe's workflow."""
    right_share: float = Field(default=0.5, ge=0, le=1)
    """Share of rollouts in which the built-in scripts give the reference answer or the expert's actions."""
    num_words: int = Field(default=8, ge=0)
    """Meaningless words before an answer, different in each rollout; none where `reward` is a function of the recipe's."""
    seed: int = 0
    """Seeds the script together with `run.seed`."""


class EndpointConfig(Section):
    port: int | None = Field(default=None, ge=0, le=65535)
    """HTTP port of the OpenAI-compatible endpoint, at the host of its service; 0 takes a free one, null serves none."""
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """A larger request is refused."""


class InferenceConfig(Section):
    host: str = "127.0.0.1"
    """Bind address. Another than loopback needs keys (`millrace keys`, docs/security.md)."""
    port: int = Field(default=50061, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    engine: Literal["torch", "forced", "scripted", "sglang"] = "torch"
    """`torch`: embedded, CPU or one GPU. `forced`: the same, over tokens that a script chooses instead of sampling, for
    trying a recipe without a trained model. `scripted`: no model, for tests and simulations. `sglang`: many GPUs."""
    policies: list[str] = []
    """Policies that this service serves; empty means all."""
    num_slots: int = Field(default=64, ge=1)
    """Rollouts played at once."""
    engine_slots: int | None = Field(default=None, ge=1)
    """Requests generated at once by each engine; left out, as many as `num_slots`."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """After a swap: recompute the KV cache (exact) or keep it (segments are marked `mixed_cache`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the engine computes."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads on a CPU."""
    node: int = Field(default=0, ge=0)
    """The node it runs on. `millrace run` starts what belongs to node 0 and prints the commands for the others."""
    gpus: list[Annotated[int, Field(ge=0)]] = []
    """GPUs of its node that it gets for itself; empty: it sees what its environment shows. Variable: INFERENCE_<NAME>_GPUS."""
    engines: dict[str, Annotated[int, Field(ge=1)]] = {}
    """With `sglang`, engines of each policy (data parallel); left out, all GPUs are the only policy's."""
    scripted: ScriptedEngineConfig = ScriptedEngineConfig()
    """Settings of the scripted engine."""
    forced: ForcedEngineConfig = ForcedEngineConfig()
    """Settings of the forced engine."""
    sglang: SglangConfig = SglangConfig()
    """Settings of the SGLang engines."""
    endpoint: EndpointConfig = EndpointConfig()
    """The OpenAI-compatible endpoint, for the workflow `external_agent`."""

    @property
    def tells_kept_tokens(self) -> bool:
        """Whether the engine says which tokens a truncated sampling could draw, without which its samples are not trained."""
        return self.engine != "scripted"


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
    """Optimizer updates; 0 leaves the model as it was built."""
    batch_size: int = Field(default=192, ge=1)
    """Dialogues per update."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak of a cosine schedule."""
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
    """Times in a row that a process is started again that was killed by a signal, or lost what it cannot go on without; one
    that has lived for ten minutes begins anew."""
    fork: bool = True
    """Fork trainers (of one rank) and replicas on a CPU with one thread from one process that has imported torch: they start,
    and start again after a kill, without five seconds of importing, and share its memory."""
    stop_grace_s: float = Field(default=20.0, gt=0)
    """A process that does not stop by itself within this is killed."""
    gpu_memory_gib: float = Field(default=80.0, gt=0)
    """Memory of each GPU. `millrace check` and `millrace run` refuse what cannot fit."""


class MetricsConfig(Section):
    enabled: bool = False
    """Every process serves `/metrics` for Prometheus over HTTP, and writes where into RUN/prometheus."""
    ports: dict[str, Annotated[int, Field(ge=0, le=65535)]] = {}
    """Ports by process (orchestrator, inference-NAME, trainer-POLICY, publisher-POLICY, envgateway, worker); who is not
    named takes a free one."""

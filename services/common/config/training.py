"""Settings of one policy: its model, training, batches and weight transfer."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.common.config.algorithm import LossConfig, M2po
from services.common.config.base import Listening, OnDevice, OnPort, Port, Section, refuse_unread, with_device

# --- The ``adapter`` section of a policy: LoRA. Plain pydantic, no torch.


ALL_LINEAR: Literal["all-linear"] = "all-linear"


class AdapterConfig(Section):
    """A low-rank adapter on a frozen model (LoRA, Hu et al. 2021, arXiv:2106.09685): W x + alpha / rank * B A x."""

    rank: int = Field(ge=1)
    """Rows of A and columns of B, in each target."""
    alpha: float = Field(gt=0)
    """The adapter's product is multiplied by `alpha / rank`."""
    targets: list[str] | Literal["all-linear"] = ALL_LINEAR
    """The linear modules that get an adapter, by the last part of their names, such as `[q_proj, v_proj]`; `all-linear` is
    every linear module but the head."""

    @field_validator("targets")
    @classmethod
    def _are_names(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError("targets is empty: name modules, such as q_proj, or write all-linear")
        if wrong := sorted({name for name in value if not name or value.count(name) > 1}):
            raise ValueError(f"targets has {wrong[0]!r} more than once, or empty: name each module once")
        return value


# --- The ``optimizer`` section of a recipe: AdamW, its schedule, gradient clipping. Plain pydantic, no torch.


ScheduleName = Literal["constant", "linear", "cosine"]


class OptimizerConfig(BaseModel):
    """How gradients become updates.

    >>> OptimizerConfig(lr=1e-3, schedule="linear", total_updates=60, final_fraction=0.1).betas
    (0.9, 0.95)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay; never applied to norms and biases."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm; null only measures the norm."""

    schedule: ScheduleName = "constant"
    """After the warm-up: constant, or down to final_fraction * lr at total_updates, in a line or half a cosine."""

    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises in a line from lr / (warmup_updates + 1)."""

    total_updates: int | None = Field(default=None, gt=0)
    """Number of optimizer updates that the schedule spans; left out, the whole run (steps * minibatches)."""

    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of lr left at total_updates and afterwards."""

    @model_validator(mode="after")
    def _check_combination(self) -> OptimizerConfig:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {list(self.betas)}")
        if self.total_updates is not None and self.total_updates <= self.warmup_updates:
            raise ValueError(
                f"total_updates ({self.total_updates}) must be more than warmup_updates ({self.warmup_updates})"
            )
        return self


DTypeName = Literal["float32", "bfloat16", "float16"]
# Nats. Healthy runs: about 1e-6 in float32; engines in bfloat16 0.01 to 0.02.
EXACT_MISMATCH, ROUNDED_MISMATCH = 1e-3, 0.05
OFFLOAD_BUCKET_BYTES = 256 << 20  # of parameters whose moments travel together when the optimizer is offloaded


class ModelConfig(Section):
    path: str | None = None
    """A Hugging Face model directory or hub name. Left out only when `warm_start.<policy>` makes the model."""
    context_length: int = Field(default=4096, ge=8)
    """Prompt and response together never exceed this many tokens."""


class ResampleConfig(Section):
    keep: int = Field(ge=2)
    """Rollouts kept of each task group (GRPO-RoC samples 32 and keeps 16). Groups of equal rewards are dropped."""
    positives: Literal["lowest", "weighted"] = "lowest"
    """Which right ones: those with the lowest penalty, or a draw weighted by the penalty: the metric `penalty` of a sequence,
    0 without one."""
    negatives: Literal["first", "uniform"] = "first"
    """Which wrong ones: the first, or drawn."""


class OverlongPenaltyConfig(Section):
    max_tokens: int = Field(ge=1)
    """A sequence in which the policy wrote this many tokens or more pays all of `factor`."""
    buffer_tokens: int = Field(ge=1)
    """The penalty grows from 0 over this many tokens below `max_tokens` (DAPO: 4096 below 20,480)."""
    factor: float = Field(default=1.0, gt=0, le=1e6)
    """The largest penalty, taken off the reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongPenaltyConfig:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} exceeds max_tokens {self.max_tokens}")
        return self


class ReplayConfig(Section):
    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a batch's `size` that is drawn again from groups that were trained before, while there are any. 0 is off."""
    capacity: int = Field(default=10_000, ge=1)
    """Trained sequences that are kept for replay; the oldest arrivals leave first."""
    max_staleness: int = Field(default=8, ge=1)
    """Largest age, in versions, of a replayed sequence; of its own, beside the batch's `max_staleness`."""


class BatchConfig(Section):
    size: int = Field(default=256, ge=1)
    """Sequences (not prompts) that one training step takes, at least; advantage groups are taken whole."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per training step."""
    max_staleness: int = Field(default=2, ge=0)
    """How many batches of task groups are issued ahead: a rollout that takes no longer than they do is at most so many
    versions old when trained. `late` sets the treatment of an older token. 0 is on-policy training: a sequence with a token
    of an older version is not trained, with `late: mask` its older tokens are not."""
    late: Literal["keep", "mask", "wait", "drop"] = "keep"
    """Treatment of tokens that are older than `max_staleness`. `keep`: trained, with their true age. `mask`: they are
    masked, the rest of the sequence is trained. `wait`: before a group becomes too old the trainer waits once for the
    group, up to a quarter of the time that the training step before took; later as with `keep`. `drop`: a sequence with such a token is dropped, and a running
    rollout that would bring one is cancelled. Its siblings are trained, and a group's statistics are of the whole
    group."""
    max_token_age: int | None = Field(default=None, ge=0)
    """Tokens that are more versions older than the weights that a step starts from are masked, except with `drop`. At least
    `max_staleness`. Left out, tokens of any age are trained, which asks for a loss that bounds stale tokens."""
    order: Literal["deadline", "fifo"] = "deadline"
    """`deadline`: oldest version first. `fifo`: first complete, first trained."""
    dynamic_sampling: bool = True
    """Drop advantage groups of equal rewards: they carry no gradient. Off means truly off."""
    group_by: Literal["attempt", "rollout", "policy"] = "attempt"
    """The sequences of a task group that are compared with each other. `attempt`: the policy's sequences of one role
    and attempt, so that first tries and retries are normalised apart. `rollout`: rollouts, by the mean reward of the
    policy's sequences in each; all of these get the rollout's advantage. `policy`: all sequences of the policy, so that
    a rollout counts as often as it has sequences. With `attempt`, too, a rollout counts once: an agent's threads share
    its advantage."""
    resample: ResampleConfig | None = None
    """GRPO-RoC: keep a part of each group, failures varied and successes clean. Left out: the whole group."""
    overlong_penalty: OverlongPenaltyConfig | None = None
    """DAPO: long sequences pay. Taken off rewards after dynamic sampling and `resample` have judged them as they came,
    and before a group's statistics are stamped. Left out: no penalty."""
    replay: ReplayConfig = ReplayConfig()
    """Train a part of each batch a second time. A batch then waits for fewer fresh sequences, and is smaller than `size`
    while too few are young enough to be replayed."""

    @property
    def fresh_size(self) -> int:
        """Sequences of a batch, at least, that were never trained before."""
        return max(1, self.size - round(self.replay.ratio * self.size))

    @property
    def late_rule(self) -> Literal["keep", "mask", "wait", "drop"]:
        """`late`, and `drop` for on-policy training, which trains no older token."""
        return self.late if self.max_staleness or self.late == "mask" else "drop"

    @property
    def lateness(self) -> str:
        """The effect of `max_staleness` and `late` together, as a sentence."""
        if not self.max_staleness:
            older = "token" if self.late == "mask" else "sequence with a token"
            replayed = ", but replayed ones (batch.replay)" if self.replay.ratio else ""
            return f"training is on-policy: no {older} of an older version is trained{replayed} (max_staleness: 0)"
        older = {"mask": "without their older tokens", "drop": "not at all"}.get(self.late, "with their true age")
        capped = "" if self.max_token_age is None else f", without tokens older than {self.max_token_age} versions"
        return (
            f"sequences are trained at most {self.max_staleness} versions old (max_staleness), but for slow rollouts: these are "
            f"trained {older}{capped} (late: {self.late})"
        )

    @model_validator(mode="after")
    def _fits_together(self) -> BatchConfig:
        if self.resample is not None and self.group_by == "rollout":
            raise ValueError(
                "resample keeps single sequences of a group, and group_by is rollout: leave resample out, or write "
                "group_by: attempt"
            )
        if self.replay.ratio > 0 and self.minibatches > self.fresh_size:
            raise ValueError(
                f"minibatches ({self.minibatches}) exceeds the {self.fresh_size} fresh sequences that replay.ratio "
                f"{self.replay.ratio:g} leaves of size {self.size}: a minibatch needs at least one sequence"
            )
        # with ``drop`` and ``mask`` no token older than ``max_staleness`` is trained
        refuse_unread(self, "late", {"max_token_age": ("keep", "wait")})
        if self.late == "wait" and self.order != "deadline":
            raise ValueError(f"late: wait trains due groups first: set order: deadline, not {self.order}")
        if self.max_token_age is None:
            return self
        if self.max_token_age < self.max_staleness:
            raise ValueError(
                f"max_token_age ({self.max_token_age}) is below max_staleness ({self.max_staleness}): rollouts that are "
                "not late would be masked"
            )
        if self.replay.ratio > 0 and self.max_token_age < self.replay.max_staleness:
            raise ValueError(
                f"max_token_age ({self.max_token_age}) is below replay.max_staleness ({self.replay.max_staleness}): "
                "lower replay.max_staleness"
            )
        return self


class TrainerConfig(OnPort, OnDevice):
    port: Port = 50071
    """Port of the trainer's StatusService; 0 takes a free one."""
    num_ranks: int = Field(default=1, ge=1)
    """Processes that share the training (FSDP2), on all nodes together."""
    nodes: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1)
    """Nodes over which the ranks are spread, as many on each; the first is 0. Several need a directory that all of them see
    for the run's checkpoints, a `rendezvous_port`, and an `interface`."""
    rendezvous_port: Port = 0
    """Port at which the ranks of several nodes find each other."""
    interface: str = ""
    """Network interface between several nodes, such as `eth1` (a node may name another in GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME). Gradients cross this interface without encryption or authentication: NCCL and gloo have none.
    So the interface must be of a private network, and there is no default."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that the optimizer updates. `bfloat16` halves their memory and loses updates smaller than 1/256
    of a weight: at a learning rate of 5e-6 about 9 of 10 weights never move (`benchmarks/update_share.py`). Prefer float32
    with `offload: [optimizer]`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of forward and backward. `auto` is bfloat16 on a GPU, and float32 on a CPU."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, more time. `auto` does so on a GPU."""
    offload: list[Literal["optimizer", "reference"]] = []
    """The parts kept in host memory: `optimizer`, AdamW's moments, brought over for each update; `reference`, the
    models of the KL term and of a `teacher_model`, brought over layer by layer for each forward pass. Frees GPU memory,
    costs time; the result is the same."""
    attention: Literal["auto", "varlen", "sdpa"] = "auto"
    """Kernel for packed documents: `varlen` of torch, or `sdpa` document by document. `auto` takes the first that fits; on a
    CPU, or in float32, that is `sdpa`."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Largest mean difference, in nats, between the log-probabilities of engines and trainer on the fresh tokens of the first
    batch and of the one after two updates; above it the run pauses before it trains the batch. Left out: 1e-3 when embedded
    engines, trainer and versions are float32, else 0.05. Raise it for an engine that is meant to differ, such as one with
    quantized weights, beside `algorithm.name: tis`."""
    token_budget: int = Field(default=16384, ge=16)
    """Tokens that one packed micro-batch computes; a shared prefix of sequences counts once. Changes memory and speed,
    never the gradient."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Training steps between durable checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are removed. Recorded batches after the oldest are kept as well, so that a run whose
    newest checkpoint is damaged goes on from the one before; with 1 there is none before."""
    export_final: bool = True
    """Write a Hugging Face safetensors export when the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _by_device(cls, written: Any) -> Any:
        on_gpu = {"compute_dtype": "bfloat16", "gradient_checkpointing": True}
        return with_device(written, on_gpu, {"compute_dtype": "float32", "gradient_checkpointing": False})

    @property
    def frozen_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type in which the models of the KL term and of a `teacher_model` are held: the smaller of master and compute
        type. A forward pass rounds to it in any case."""
        return "bfloat16" if "bfloat16" in (self.master_dtype, self.compute_dtype) else "float32"


class WeightsConfig(Listening):
    publish_dtype: Literal["auto"] | DTypeName = "auto"
    """Type in which versions are published. `auto` is `trainer.compute_dtype`, so that engines get the numbers that the trainer
    computes with: bfloat16 on a GPU, float32 on a CPU. bfloat16 for processes that are started one by one, unless the
    recipe names `trainer.device`."""
    transfer: Literal["auto", "full", "delta"] = "auto"
    """`delta` sends the changes since a replica's version when they are smaller, and the publisher still keeps that version.
    `auto` does so for other hosts, and maps the full snapshot on the publisher's host. Every result is verified."""
    full_every: int = Field(default=0, ge=0)
    """With `delta` and `auto`, send every n-th version in full; 0 is never."""
    keep_versions: int = Field(default=2, ge=1)
    """Snapshots kept by the publisher, with the deltas to them; bytes that are being read stay."""
    transports: list[Literal["mapped", "bulk", "grpc"]] = Field(default=["mapped", "bulk", "grpc"], min_length=1)
    """Ways in which replicas may fetch, best first: mapped files on the same host, ZeroMQ, gRPC chunks."""
    send_bytes_per_s: float = Field(default=0.0, ge=0)
    """Most bytes per second that the publisher, and each relay, sends; 0 is no limit."""
    spill_directory: str | None = None
    """Where snapshots go when /dev/shm is full; left out, `snapshots/` in the run directory."""
    port: Port = 19861
    """Port of the publisher's WeightService; 0 takes a free one."""


class PolicyConfig(Section):
    trained: bool = True
    """False: served as its checkpoint is, version 0 for the whole run: a teacher (`algorithm.distillation`) or a partner
    that stays as it is. No trainer, batches or quota; of the sections below only `model`, `weights.publish_dtype`
    and `trainer.master_dtype` count, which say how the checkpoint is cast."""
    model: ModelConfig = ModelConfig()
    """The model."""
    adapter: AdapterConfig | None = None
    """LoRA: the model stays as it is, in `trainer.compute_dtype`, and only an adapter is trained, kept in checkpoints,
    published in `weights.publish_dtype`, and served. `trainer.master_dtype` is the adapter's. Left out: all weights are
    trained."""
    algorithm: LossConfig = M2po()
    """Loss and advantages."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    batch: BatchConfig = BatchConfig()
    """How sequences become batches."""
    trainer: TrainerConfig = TrainerConfig()
    """The training processes."""
    weights: WeightsConfig = WeightsConfig()
    """How versions travel to the replicas."""

    @model_validator(mode="before")
    @classmethod
    def _adapters_travel_whole(cls, written: Any) -> Any:
        """Every element of an adapter moves in every update, so a delta is no smaller than the adapter and costs its coding."""
        if not isinstance(written, dict) or written.get("adapter") is None:
            return written
        weights = written.get("weights", {})
        if not isinstance(weights, dict):
            return written
        if weights.get("transfer", "auto") not in ("auto", "full"):
            raise ValueError(
                f"weights.transfer is {weights['transfer']}, and adapter is set: every element of an adapter moves in every "
                "update, so that a delta saves nothing: write transfer: full, or leave it out"
            )
        if weights.get("full_every"):
            raise ValueError(
                f"weights.full_every is {weights['full_every']}, and adapter is set: each version of an adapter is sent in "
                "full: leave full_every out"
            )
        return {**written, "weights": {**weights, "transfer": "full"}}

    @property
    def published_dtype(self) -> DTypeName:
        """The type of versions; bfloat16 while it is `auto` and no process knows the trainer's device: all must agree."""
        return "bfloat16" if self.weights.publish_dtype == "auto" else self.weights.publish_dtype

    @model_validator(mode="after")
    def _fits_together(self) -> PolicyConfig:
        if self.weights.publish_dtype == "auto" and self.trainer.compute_dtype != "auto":  # published as computed
            weights = self.weights.model_copy(update={"publish_dtype": self.trainer.compute_dtype})
            object.__setattr__(self, "weights", weights)
        distillation = self.algorithm.distillation
        if self.adapter is not None:
            if not self.trained:
                raise ValueError(
                    "adapter is set, and trained is false: there is no adapter to train; leave adapter out"
                )
            if "optimizer" in self.trainer.offload:
                raise ValueError(
                    "trainer.offload has optimizer, and adapter is set: the base has no moments, and those of an adapter are "
                    "small; leave optimizer out"
                )
            has_teacher = distillation is not None and distillation.teacher_model is not None
            if "reference" in self.trainer.offload and not has_teacher:
                raise ValueError(
                    "trainer.offload has reference, and adapter is set: the reference is the model without its adapter, "
                    "without weights of its own; leave reference out"
                )
        if distillation is not None and self.batch.dynamic_sampling:
            raise ValueError(
                "batch.dynamic_sampling drops groups of equal rewards, which algorithm.distillation can learn from: set "
                "batch.dynamic_sampling to false"
            )
        if (range_ := self.algorithm.reward_range) is not None and self.batch.overlong_penalty is not None:
            raise ValueError(
                f"algorithm.advantage: {self.algorithm.advantage} needs rewards {range_}, and batch.overlong_penalty makes "
                "others: leave one of them out"
            )
        return self


# --- Settings of the threshold of an evaluation that ends training (`run.until`).


_PASS_AT = re.compile(r"pass@([1-9][0-9]*)")


class UntilConfig(Section):
    evaluation: str
    """The way of sampling, a name in `evaluation.samplings`, whose results count: that of the start and those of every
    `evaluation.every` steps. Evaluations at the end, or by request, do not count."""
    at_least: float | dict[str, float]
    """The least value that holds. A number for each policy with `rollout.policies: apart`, where every policy has a pass of
    its own, or one for all of them: training ends when each has reached its own in the same evaluation. A mean reward with a
    failed sample does not count, if the reward of a failed sample (`evaluation.failed_reward`, or 0) is no less than this."""
    metric: str = "reward"
    """`reward`, the mean over tasks and samples, or `pass@k` for a power of two k up to the samples of a task."""
    dataset: str | None = None
    """A name in `data.evaluation`; left out, the mean over all of them, each counted once."""
    in_a_row: int = Field(default=2, ge=1)
    """Evaluations in a row that must reach the value, so that no single lucky sample ends a run."""

    @field_validator("at_least")
    @classmethod
    def _numbers(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for number in value.values() if isinstance(value, dict) else (value,):
            if not math.isfinite(number):
                raise ValueError(f"{number} is no threshold: write a finite number")
        if value == {}:
            raise ValueError("it names no policy: write a number, or one for each policy")
        return value

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "reward" and _PASS_AT.fullmatch(value) is None:
            raise ValueError(f"{value!r} is no metric of an evaluation: write reward, or pass@k such as pass@1")
        return value

    @property
    def pass_at(self) -> int | None:
        """The k of `pass@k`; None where the mean reward counts."""
        found = _PASS_AT.fullmatch(self.metric)
        return None if found is None else int(found[1])

    def threshold(self, policy: str = "") -> float:
        """The threshold of a policy that plays apart; without a name, of all that play together."""
        return self.at_least[policy] if isinstance(self.at_least, dict) else self.at_least

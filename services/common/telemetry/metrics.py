"""Metrics as JSON lines: one row per fact, appended, readable while the run goes on.

Keys of rows that other code reads are members of the enums below, so a rename on one side only fails to type-check.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from services.common.records import WeightTransfer
from services.common.telemetry.accounts import AccountState


class RowKind(enum.StrEnum):
    """The kinds of rows in ``run_files.metrics`` and ``run_files.warm_start_metrics``."""

    TRAINING_STEP = "training_step"
    THROUGHPUT = "throughput"
    WEIGHT_TRANSFER = "weight_transfer"
    STALL = "stall"
    ACCOUNTS = "accounts"
    EVALUATION = "evaluation"
    THRESHOLD = "threshold"
    SUMMARY = "summary"
    WARM_START = "warm_start"


class StallMoment(enum.StrEnum):
    """The field ``moment`` of a row of a stall."""

    BEGIN = "begin"
    END = "end"


class StepKey(enum.StrEnum):
    """Keys of a row of a training step that the orchestrator writes; ``fates.StepFact`` has the counts of fates."""

    # of rollouts since the batch before
    ROLLOUTS_FINISHED = "rollouts_finished"
    FAILURES = "failures"
    ROLLOUT_REWARD_MEAN = "rollout_reward_mean"
    GROUPS_EQUAL_DROPPED = "groups_equal_dropped"
    TRAINED_REWARD_MEAN = "trained_reward_mean"
    OVERLONG_SHARE = "overlong_share"
    OVERLONG_PENALTY_MEAN = "overlong_penalty_mean"
    # of the batch
    BATCH_REWARD_MEAN = "batch_reward_mean"
    NUM_SEQUENCES = "num_sequences"
    NUM_TRAINED_TOKENS = "num_trained_tokens"
    RESPONSE_TOKENS_MEAN = "response_tokens_mean"
    STALENESS_MEAN = "staleness_mean"
    STALENESS_MAX = "staleness_max"
    NUM_REPLAYED = "num_replayed"
    REPLAYED_STALENESS_MAX = "replayed_staleness_max"
    # of the prompts
    CURATION_SKIPPED = "curation_skipped"
    CURATION_SOLVED = "curation_solved"
    CURATION_UNSOLVED = "curation_unsolved"
    # of the step
    COMPUTE_S = "compute_s"
    ELAPSED_S = "elapsed_s"
    # of a source of a mixture only, up to the batch
    SHARE = "share"  # of the trained sequences
    WANTED_SHARE = "wanted_share"  # by its weight
    FORGIVEN = "forgiven"  # sequences that others were trained instead of, while the source was exhausted


SOURCE = "source/"


def source_key(source: str, key: StepKey) -> str:
    """The key of a value of one source of a mixture.

    >>> source_key("maths", StepKey.SHARE)
    'source/maths/share'
    """
    return f"{SOURCE}{source}/{key.value}"


def sources_in(row: Mapping[str, Any]) -> list[str]:
    """The sources that a row of a training step tells of, in order; empty for a run with one dataset.

    >>> sources_in({"source/maths/share": 0.5, "source/code/share": 0.5, "loss": 1.0})
    ['maths', 'code']
    """
    end = f"/{StepKey.SHARE.value}"
    return [key[len(SOURCE) : -len(end)] for key in row if key.startswith(SOURCE) and key.endswith(end)]


class RolloutKey(enum.StrEnum):
    """Keys of the metrics of a trajectory or an episode that several workflows and environments of the gateway write."""

    REWARD_UNPARSED = "reward_unparsed"  # 1 where no answer could be read from the completion
    REWARD_OPAQUE = "reward_opaque"  # 1 where the program can forge its reward, by opaque tests; else left out
    TRUNCATED = "truncated"  # 1 where a budget cut the policy's last turn


ROLE_REWARD = "rollout_reward/"  # and the role and attempt: the mean reward of their sequences


class TrainerKey(enum.StrEnum):
    """Fields of the trainer's ``StepMetrics`` that the command line reads; a test compares both."""

    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    LEARNING_RATE = "learning_rate"
    UPDATES_APPLIED = "updates_applied"
    UPDATES_SKIPPED = "updates_skipped"
    ENTROPY = "entropy"
    KL_REFERENCE = "kl_reference"
    ADVANTAGE_ABS_MEAN = "advantage_abs_mean"
    MISMATCH_ABS = "mismatch_abs"
    MISMATCH_KL = "mismatch_kl"
    MISMATCH_FRESH_ABS = "mismatch_fresh_abs"
    FRESH_SHARE = "fresh_share"

    @property
    def in_row(self) -> str:
        """
        >>> TrainerKey.LOSS.in_row
        'trainer/loss'
        """
        return trainer_key(self)


def trainer_key(name: str) -> str:
    """The key of a metric of the trainer in a row of a training step."""
    return f"trainer/{name}"


class ThroughputKey(enum.StrEnum):
    """Keys of a row of throughput."""

    TOKENS_PER_S = "tokens_per_s"
    REPLICAS = "replicas"
    RUNNING = "running"
    TRAINER_IDLE_SHARE = "trainer_idle_share"
    REPLICA_IDLE_SHARE = "replica_idle_share"


class MetricsWriter:
    """Appends rows ``{"time": seconds since the epoch, "kind": ..., ...}`` to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, kind: RowKind, /, **fields: Any) -> dict[str, Any]:
        """Append a row and return it. Raises ``ValueError`` for fields with a name of the row's own."""
        if taken := fields.keys() & {"time", "kind"}:
            raise ValueError(f"a field of a row of {kind} cannot be called {', '.join(sorted(taken))}")
        row = {"time": time.time(), "kind": str(kind), **fields}
        self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        return row

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTransfer:
    """A transfer, and the replica that reports it: one row of ``RowKind.WEIGHT_TRANSFER``."""

    replica: str
    transfer: WeightTransfer

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ReportedTransfer:
        known = {field.name: row[field.name] for field in fields(WeightTransfer)}
        return cls(replica=row["replica"], transfer=WeightTransfer(**known))


# --- Contents of ``summary.json``: the orchestrator writes the file at the end of a run, and the launcher adds its
# figures.


EstimateSummary = dict[str, float]
"""A mean with its 95% interval: ``value``, ``low``, ``high``."""
EvaluationSummary = dict[str, Any]
"""A finished evaluation: the fields of ``journal.entries.EvaluationResult`` without its name, ``pass_at`` by k."""
RunSummary = dict[str, Any]
"""The result of a run: ``run_id``, ``state``; ``steps`` by policy; ``evaluations`` by name; ``until``, the state of the
threshold or None; ``overlap_share``, ``max_staleness``, ``seconds``, ``counters``; ``time``, component -> activity -> share;
``waited_for``, component -> awaited component -> share. The launcher adds ``cpu_seconds``, ``cores`` and ``load``."""


# --- The lanes and gauges of the environment gateway's queue, which the gateway reports and the stall detector reads.


class Lane(enum.StrEnum):
    """Priority of a job in the gateway's queue."""

    INTERACTIVE = "interactive"  # a rollout waits for the answer
    BATCH = "batch"  # the answer grades a whole rollout


class QueueGauge(enum.StrEnum):
    REDIS_CONNECTED = "queue_redis_connected"
    WORKERS = "queue_workers"
    UNANSWERED = "queue_unanswered"  # jobs sent to workers


def waiting_gauge(lane: Lane) -> str:
    """The gauge of the jobs that wait in a lane."""
    return f"queue_{lane}_waiting"


def num_waiting(gauges: Mapping[str, float]) -> float:
    """Jobs that wait for a slot, in all lanes."""
    return sum(gauges.get(waiting_gauge(lane), 0.0) for lane in Lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    service: str  # orchestrator, inference, trainer, publisher, envgateway or worker
    instance_id: str
    run_id: str  # empty before it knows
    state: str  # starting, ready or stopping
    started_at: float  # seconds since the epoch
    gauges: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    accounts: tuple[AccountState, ...] = ()

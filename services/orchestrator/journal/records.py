"""Format of the journal's lines, in pairs: ``x_to_json`` and ``x_from_json``.

Columns are the same in every line of a kind: open mappings (metrics, counters) are lists of name and value, and a
task's row is a JSON text. ``rollouts`` has the lines of trajectories and failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import orjson

from services.common.records import fates
from services.common.records.types import (
    Interval,
    MinibatchTotals,
    Purpose,
    Sampling,
    Task,
    TaskGroupOrder,
    WeightVersion,
    by_name,
)
from services.orchestrator.state.scores import DatasetScore, Estimate

if TYPE_CHECKING:
    from services.orchestrator.journal.journal import Journal

# Kinds of records; each is the name of its segment files.
RUN = "runs"
GROUP = "task_groups"
ASSIGNMENT = "assignments"
TRAJECTORY = "trajectories"
FAILURE = "failures"
VERDICT = "verdicts"  # the fates of a task group's advantage groups at its completion
CLOSED = "closed_groups"
OBSERVATION = "observations"  # the rewards of a prompt, for the curation
BATCH = "batches"
VERSION = "versions"
EVALUATION_START = "evaluation_starts"
EVALUATION = "evaluations"
STATE = "states"
SET_ASIDE = "set_aside"  # a record that is not used, and why

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """An issued task group."""

    order: TaskGroupOrder
    position: int
    evaluation: str
    replica_id: str
    incarnation: str
    born: Mapping[str, int] = field(default_factory=dict)  # policy -> version that the replica held


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    """One sequence of a recorded batch, without its tokens."""

    sequence_id: str
    minibatch: int
    position: int  # order inside the minibatch
    group_mean: float
    group_std: float
    group_size: int  # rewards in these statistics
    staleness: int
    num_tokens: int
    reward: float | None = None  # the trained reward; None: as in the trajectory
    replayed: bool = False  # an earlier batch contained the sequence, too
    trained_from: int = 0  # policy tokens of older versions are masked; 0 masks none
    num_masked_tokens: int = 0
    advantage_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch, assembled once for (policy, training step)."""

    policy: str
    training_step: int
    entries: tuple[BatchEntry, ...]
    minibatches: tuple[MinibatchTotals, ...]
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    name: str  # "start/greedy"
    versions: Mapping[str, int]
    newest_versions: Mapping[str, int]  # differ from `versions` for an unpinned pass: the range of used versions
    pinned: bool
    mean_reward: (
        float | None
    )  # over datasets, each counted once; failed ones as `evaluation.failed_reward` says; None where every sample of a dataset failed
    num_trajectories: int
    num_failed: int
    datasets: tuple[DatasetScore, ...] = ()
    roles: Mapping[str, float] = field(default_factory=dict)  # "policy/role/attempt" -> mean reward of its sequences
    compared_with: str = ""  # the run's first evaluation of this kind; empty for that one
    difference: Estimate | None = None  # to that pass, of mean_reward, paired by items; None where unknown
    elapsed_s: float = 0.0  # from the begin of the run to its last trajectory
    num_opaque: int = 0  # trajectories whose reward the program can forge, by opaque tests


def pairs(values: Mapping[str, float]) -> list[Json]:
    return [{"name": name, "value": float(value)} for name, value in values.items()]


def from_pairs(values: list[Json]) -> dict[str, float]:
    # JSON has no NaN: null replaces NaN.
    return {v["name"]: math.nan if v["value"] is None else float(v["value"]) for v in values}


def group_to_json(record: GroupRecord) -> Json:
    order = record.order
    return {
        "task_group_id": order.task_group_id,
        "task_id": order.task.task_id,
        "data_json": orjson.dumps(order.task.data).decode(),
        "num_slots": len(order.indices),
        "purpose": order.purpose.value,
        **by_name(order.sampling),
        "required_versions": _versions_to_json(order.required_versions),
        "policies": list(order.policies),
        "seed": order.seed,
        "timeout_s": order.timeout_s,
        "source": order.source,
        "position": record.position,
        "evaluation": record.evaluation,
        "replica_id": record.replica_id,
        "incarnation": record.incarnation,
        "born": _versions_to_json(record.born),
    }


def group_from_json(record: Json) -> GroupRecord:
    return GroupRecord(
        order=TaskGroupOrder(
            task_group_id=record["task_group_id"],
            task=Task(task_id=record["task_id"], data=orjson.loads(record["data_json"])),
            indices=tuple(range(record["num_slots"])),
            purpose=Purpose(record["purpose"]),
            sampling=Sampling(**{name: record[name] for name in Sampling.__slots__}),
            required_versions=_versions_from_json(record["required_versions"]),
            policies=tuple(record["policies"]),
            seed=record["seed"],
            timeout_s=record["timeout_s"],
            source=record["source"],
        ),
        position=record["position"],
        evaluation=record["evaluation"],
        replica_id=record["replica_id"],
        incarnation=record["incarnation"],
        born=_versions_from_json(record["born"]),
    )


def assignment_to_json(task_group_id: str, replica_id: str, incarnation: str, born: Mapping[str, int]) -> Json:
    """Record of open slots that are issued again; ``born``: their start versions."""
    return {
        "task_group_id": task_group_id,
        "replica_id": replica_id,
        "incarnation": incarnation,
        "born": _versions_to_json(born),
    }


def assignment_from_json(record: Json) -> tuple[str, str, dict[str, int]]:
    """(replica id, incarnation, start versions by policy)."""
    return record["replica_id"], record["incarnation"], _versions_from_json(record["born"])


def closed_to_json(task_group_id: str, reason: fates.ClosedReason) -> Json:
    return {"task_group_id": task_group_id, "reason": reason.value}


def close_group(journal: Journal, task_group_id: str, reason: fates.ClosedReason) -> None:
    """Submit the record of the end of a task group."""
    record = closed_to_json(task_group_id, reason)
    journal.submit(CLOSED, task_group_id, lambda: record)


def closed_reason(record: Json) -> str:
    """A ``ClosedReason``."""
    return str(record["reason"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFate:
    """Fate of one sequence at the completion of its task group."""

    index: int  # slot of its rollout
    position: int  # in the rollout's trajectory
    num_tokens: int  # that the policy wrote
    fate: fates.GroupFate


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """Fate of one advantage group at the completion of its task group."""

    policy: str
    role: str
    attempt: int
    num_sequences: int  # of the group
    num_kept: int  # that went into the buffer
    mean: float
    std: float
    outcome: fates.GroupFate
    num_expired: int = 0  # members that were too old already; they count in mean and std
    members: tuple[MemberFate, ...] = ()  # all of them


_VERDICT_FIELDS = tuple(found.name for found in fields(GroupVerdict) if found.name != "members")


def verdicts_to_json(task_group_id: str, verdicts: Iterable[GroupVerdict]) -> Json:
    return {"task_group_id": task_group_id, "advantage_groups": [_verdict_to_json(verdict) for verdict in verdicts]}


def _verdict_to_json(verdict: GroupVerdict) -> Json:
    members = [
        {"index": m.index, "position": m.position, "num_tokens": m.num_tokens, "fate": m.fate.value}
        for m in verdict.members
    ]
    return {**{name: getattr(verdict, name) for name in _VERDICT_FIELDS}, "members": members}


def verdicts_from_json(record: Json) -> list[GroupVerdict]:
    return [_verdict_from_json(found) for found in record["advantage_groups"]]


def _verdict_from_json(record: Json) -> GroupVerdict:
    members = (MemberFate(**{**m, "fate": fates.GroupFate(m["fate"])}) for m in record["members"])
    return GroupVerdict(**{**record, "outcome": fates.GroupFate(record["outcome"]), "members": tuple(members)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A record that is set aside: its identity, its position, and the reason."""

    kind: str
    key: str
    number: int  # of the record, in the order in which records were submitted
    segment: int
    offset: int
    reason: fates.SetAsideReason
    detail: str = ""


def set_aside_to_json(record: SetAside) -> Json:
    return {**by_name(record), "reason": record.reason.value}


def set_aside_from_json(record: Json) -> SetAside:
    return SetAside(**{**record, "reason": fates.SetAsideReason(record["reason"])})


def batch_key(policy: str, training_step: int) -> str:
    return f"{policy}/{training_step}"


def batch_to_json(batch: BatchRecord) -> Json:
    return {
        "policy": batch.policy,
        "training_step": batch.training_step,
        "minibatches": list(map(by_name, batch.minibatches)),
        "statistics": pairs(batch.statistics),
        "sequences": list(map(by_name, batch.entries)),
    }


def batch_from_json(record: Json) -> BatchRecord:
    return BatchRecord(
        policy=record["policy"],
        training_step=record["training_step"],
        entries=tuple(BatchEntry(**e) for e in record["sequences"]),
        minibatches=tuple(MinibatchTotals(**m) for m in record["minibatches"]),
        statistics=from_pairs(record["statistics"]),
    )


def version_to_json(
    version: WeightVersion,
    checkpoint_step: int,
    metrics: Mapping[str, float],
    compute: Iterable[Interval] = (),
) -> Json:
    """``compute``: intervals in which the trainer computed the step."""
    return {
        "policy": version.policy,
        "number": version.number,
        "digest": version.digest,
        "sources": list(version.sources),
        "checkpoint_step": checkpoint_step,
        "metrics": pairs(metrics),
        "compute": [{"begin": begin, "end": end} for begin, end in compute],
    }


def version_from_json(record: Json) -> tuple[WeightVersion, int, dict[str, float]]:
    """(version, step of the newest durable checkpoint then, metrics of its training step)."""
    version = WeightVersion(
        policy=record["policy"], number=record["number"], digest=record["digest"], sources=tuple(record["sources"])
    )
    return version, record["checkpoint_step"], from_pairs(record["metrics"])


def compute_from_json(record: Json) -> tuple[Interval, ...]:
    """Intervals in which the trainer computed the step of a version."""
    return tuple((stretch["begin"], stretch["end"]) for stretch in record["compute"])


def evaluation_to_json(result: EvaluationResult) -> Json:
    return {
        **asdict(result),
        "versions": _versions_to_json(result.versions),
        "newest_versions": _versions_to_json(result.newest_versions),
        "datasets": [
            {**asdict(found), "pass_at": [{"k": k, **asdict(share)} for k, share in found.pass_at]}
            for found in result.datasets
        ],
        "roles": pairs(result.roles),
    }


def evaluation_from_json(record: Json) -> EvaluationResult:
    read = {
        "versions": _versions_from_json(record["versions"]),
        "newest_versions": _versions_from_json(record["newest_versions"]),
        "datasets": tuple(_dataset_from_json(found) for found in record["datasets"]),
        "roles": from_pairs(record["roles"]),
        "difference": _estimate_from_json(record["difference"]),
    }
    return EvaluationResult(**{**record, **read})


def _dataset_from_json(found: Json) -> DatasetScore:
    read = {
        "mean_reward": _estimate_from_json(found["mean_reward"]),
        "pass_at": tuple((v["k"], Estimate(v["value"], v["low"], v["high"])) for v in found["pass_at"]),
        "failed": tuple(found["failed"]),
        "item_rewards": tuple(found["item_rewards"]),
        "difference": _estimate_from_json(found["difference"]),
    }
    return DatasetScore(**{**found, **read})


def _estimate_from_json(found: Json | None) -> Estimate | None:
    return None if found is None else Estimate(**found)


def _versions_to_json(versions: Mapping[str, int]) -> list[Json]:
    return [{"policy": policy, "number": number} for policy, number in versions.items()]


def _versions_from_json(found: list[Json]) -> dict[str, int]:
    return {version["policy"]: version["number"] for version in found}

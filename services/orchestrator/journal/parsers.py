"""Parsers of the journal's records, by kind: JSON to the values that recovery applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.records.types import WeightVersion
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.records import BatchRecord
from services.orchestrator.state.run_control import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """Values that no other record holds."""

    phase: RunState
    paused: bool
    counters: Mapping[str, int]
    timeline: Mapping[str, float]


def state_from_json(record: dict[str, Any]) -> StateRecord:
    return StateRecord(
        phase=RunState(record["phase"]),
        paused=bool(record["paused"]),
        counters={name: int(value) for name, value in records.from_pairs(record["counters"]).items()},
        timeline=records.from_pairs(record["timeline"]),
    )


def _observation(record: dict[str, Any]) -> tuple[str, int, list[float]]:
    """(source, row, rewards)"""
    return str(record["source"]), int(record["row"]), [float(reward) for reward in record["rewards"]]


def _version(record: dict[str, Any]) -> tuple[WeightVersion, dict[str, float]]:
    version, _, metrics = records.version_from_json(record)
    return version, metrics


def settled_batch_from_json(record: dict[str, Any]) -> BatchRecord:
    """A batch record without its sequences, which were trained long ago."""
    return BatchRecord(
        policy=record["policy"],
        training_step=record["training_step"],
        entries=(),
        minibatches=(),
        statistics=records.from_pairs(record["statistics"]),
    )


def _evaluation_start(record: dict[str, Any]) -> tuple[str, dict[str, int]]:
    return record["evaluation_id"], {v["policy"]: v["number"] for v in record["versions"]}


PARSERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    records.ASSIGNMENT: records.assignment_from_json,
    records.TRAJECTORY: rollouts.trajectory_from_json,
    records.FAILURE: rollouts.failure_from_json,
    records.OBSERVATION: _observation,
    records.VERSION: _version,
    records.BATCH: records.batch_from_json,
    records.EVALUATION_START: _evaluation_start,
    records.EVALUATION: records.evaluation_from_json,
}

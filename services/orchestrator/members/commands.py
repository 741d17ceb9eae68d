"""Commands of the orchestrator to replicas and trainers, as plain records."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.records.device_turn import DeviceTurn
from services.common.records.types import FetchPlan, TaskGroupOrder, WeightVersion


@dataclass(frozen=True, slots=True)
class PlayGroup:
    order: TaskGroupOrder


@dataclass(frozen=True, slots=True)
class CancelGroup:
    task_group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceVersion:
    version: WeightVersion
    plan: FetchPlan | None = None


@dataclass(frozen=True, slots=True)
class LeavePool:
    reason: str


@dataclass(frozen=True, slots=True)
class UseGateway:
    address: str


ReplicaCommand = PlayGroup | CancelGroup | AnnounceVersion | LeavePool | UseGateway | DeviceTurn


@dataclass(frozen=True, slots=True)
class PauseTraining:
    pass


@dataclass(frozen=True, slots=True)
class ResumeTraining:
    pass


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    pass


@dataclass(frozen=True, slots=True)
class StopTraining:
    reason: str


TrainerCommand = PauseTraining | ResumeTraining | SaveCheckpoint | StopTraining | DeviceTurn

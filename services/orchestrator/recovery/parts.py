"""The parts of the orchestrator that recovery restores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.config.training.policy import BatchConfig
from services.orchestrator.buffer.batches import Batches
from services.orchestrator.buffer.pipeline import ExperiencePipeline
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.published_versions import PublishedVersions
from services.orchestrator.ingest.bounds import RecordBounds
from services.orchestrator.ingest.ingest import Ingest
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.writer import Journal
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.metrics import Timeline
from services.orchestrator.state.groups import Outcome, TaskGroup
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.versions import VersionLedger
from services.orchestrator.tasks.orders import GroupNames, TrainingOrders


class GroupEvents(Protocol):
    """Events of task groups and of run control, which recovery repeats."""

    def observe(self, group: TaskGroup) -> None: ...

    def apply_resolved(self, group: TaskGroup, outcome: Outcome) -> None: ...

    def apply_control(self) -> None: ...

    def withdraw(self) -> None:
        """Drop the submitted records, as a record cannot be applied; the parts are void afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryParts:
    """Parts without state, whose journal is not started yet. ``judged_before``: task groups with journaled verdicts."""

    aside: Quarantine
    batch_configs: Mapping[str, BatchConfig]
    batches: Mapping[str, Batches]
    bounds: RecordBounds
    control: RunControl
    counters: Counter[str]
    dispatcher: Dispatcher
    evaluations: Evaluations
    events: GroupEvents
    experience: ExperiencePipeline
    groups: dict[str, TaskGroup]
    ingest: Ingest
    journal: Journal
    judged_before: set[str]
    ledgers: Mapping[str, VersionLedger]
    names: GroupNames
    pool: ReplicaPool
    timeline: Timeline
    training_orders: TrainingOrders
    versions: PublishedVersions

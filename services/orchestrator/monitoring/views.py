"""The parts of the orchestrator that monitoring reads. Views refer to live parts, and monitoring changes none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.evaluation import Evaluations
from services.orchestrator.dispatch.published_versions import PublishedVersions
from services.orchestrator.dispatch.threshold import Threshold
from services.orchestrator.ingest import Ingest, MaskedSamples
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import Quarantine
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.trainers import TrainerLeases
from services.orchestrator.policy_view import PolicyView
from services.orchestrator.stalls.detector import StallState
from services.orchestrator.state.disk_forecast import DiskForecast
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.timeline import Timeline
from services.orchestrator.state.versions import VersionLedger
from services.orchestrator.tasks.orders import TrainingOrders


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """For progress, gauges and the waits between components."""

    aside: Quarantine
    clock: Callable[[], float]
    control: RunControl
    counters: Mapping[str, int]
    disk: DiskForecast
    dispatcher: Dispatcher
    evaluations: Evaluations
    journal: Journal
    ledgers: Mapping[str, VersionLedger]
    masked: MaskedSamples
    policies: Mapping[str, PolicyView]
    pool: ReplicaPool
    stall_state: StallState
    started_at: float  # seconds since the epoch
    threshold: Threshold | None
    timeline: Timeline
    trainers: TrainerLeases
    versions: PublishedVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class StallView:
    """For the facts of the stall detector and the orchestrator's own activity."""

    clock: Callable[[], float]
    control: RunControl
    dispatcher: Dispatcher
    group_size: int
    ingest: Ingest
    journal: Journal
    ledgers: Mapping[str, VersionLedger]
    policies: Mapping[str, PolicyView]
    pool: ReplicaPool
    stall_state: StallState
    trainers: TrainerLeases
    training_orders: TrainingOrders
    versions: PublishedVersions

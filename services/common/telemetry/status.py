"""The status that a process reports, for ``GetStatus`` and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.telemetry.accounts import AccountState


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

"""Metrics that every process of a run exposes besides its own gauges. Does not import Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.prometheus.metric import OTHER, Metric, Sample
from services.common.telemetry.accounts import AccountState

INFO = Metric(
    "millrace_process_info",
    "gauge",
    "1 for this process: its service, its id, its run, and starting, ready or stopping.",
    own_labels=("service", "id", "run", "state"),
)
ACTIVITY = Metric(
    "millrace_activity_seconds_total",
    "counter",
    "Seconds that lanes of a component spent in an activity, by awaited component; all sum to lanes x lifetime.",
    own_labels=("component", "activity", "on"),
)
LANES = Metric("millrace_activity_lanes", "gauge", "Things that a component does at once.", own_labels=("component",))
METRICS = (INFO, ACTIVITY, LANES, OTHER)


def account_samples(accounts: Iterable[AccountState]) -> Iterable[Sample]:
    for account in accounts:
        yield Sample(metric=LANES, labels=(account.component,), value=float(account.num_lanes))
        for activity in account.activities:
            labels = (account.component, activity.name, activity.on)
            yield Sample(metric=ACTIVITY, labels=labels, value=activity.seconds)

"""Defines metrics: one line each, with its gauge of ``GetStatus``.

    Metric("rollmill_buffered_sequences", "gauge", "Sequences that wait for a batch.", "buffered/{policy}")

reads every gauge ``buffered/<anything>`` and gives each the label ``policy``. No fact has a second counter: metrics
are the gauges of ``GetStatus`` under conventional names (unit in the name, ``_total`` for counters). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.telemetry.accounts import AccountState

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # as Prometheus knows it; a counter ends in _total
    kind: Literal["gauge", "counter"]
    help: str  # one sentence, with the unit
    source: str = ""  # a gauge of GetStatus, with labels in braces; empty for what the process itself adds
    own_labels: tuple[str, ...] = ()  # of metrics without a source

    def __post_init__(self) -> None:
        if not re.fullmatch(r"rollmill_[a-z0-9_]+", self.name):
            raise ValueError(f"{self.name!r} is no name of a metric: write rollmill_<quantity>_<unit>")
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: exactly counters end in _total")

    @property
    def labels(self) -> tuple[str, ...]:
        """
        >>> Metric("rollmill_replica_slots", "gauge", "Rollouts at once.", "replica_slots/{replica}").labels
        ('replica',)
        """
        return tuple(_PLACE.findall(self.source)) or self.own_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    metric: Metric
    labels: tuple[str, ...]  # values, in the order of the metric's labels
    value: float


OTHER = Metric("rollmill_other", "gauge", "A gauge of GetStatus that has no metric of its own.", own_labels=("gauge",))


class Translation:
    """Turns gauges into samples. The first metric whose source matches a gauge takes it."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._rules = [(metric, _pattern(metric.source)) for metric in metrics if metric.source]
        self._known: dict[str, tuple[Metric, tuple[str, ...]]] = {}  # gauge -> its metric; gauges keep their names

    def samples(self, gauges: Mapping[str, float]) -> Iterable[Sample]:
        for gauge, value in gauges.items():
            if gauge not in self._known:
                self._known[gauge] = self._find(gauge)
            metric, labels = self._known[gauge]
            yield Sample(metric=metric, labels=labels, value=float(value))

    def _find(self, gauge: str) -> tuple[Metric, tuple[str, ...]]:
        for metric, pattern in self._rules:
            if found := pattern.fullmatch(gauge):
                return metric, tuple(found.groups())
        return OTHER, (gauge,)


def _pattern(source: str) -> re.Pattern[str]:
    parts = _PLACE.split(source)  # text, label, text, label, ..., text
    return re.compile("".join(re.escape(part) if number % 2 == 0 else "(.+?)" for number, part in enumerate(parts)))


INFO = Metric(
    "rollmill_process_info",
    "gauge",
    "1 for this process: its service, its id, its run, and starting, ready or stopping.",
    own_labels=("service", "id", "run", "state"),
)
ACTIVITY = Metric(
    "rollmill_activity_seconds_total",
    "counter",
    "Seconds that lanes of a component spent in an activity, by awaited component; all sum to lanes x lifetime.",
    own_labels=("component", "activity", "on"),
)
LANES = Metric("rollmill_activity_lanes", "gauge", "Things that a component does at once.", own_labels=("component",))
METRICS = (INFO, ACTIVITY, LANES, OTHER)


def account_samples(accounts: Iterable[AccountState]) -> Iterable[Sample]:
    for account in accounts:
        yield Sample(metric=LANES, labels=(account.component,), value=float(account.num_lanes))
        for activity in account.activities:
            labels = (account.component, activity.name, activity.on)
            yield Sample(metric=ACTIVITY, labels=labels, value=activity.seconds)

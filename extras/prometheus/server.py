"""``GET /metrics`` of a process in Prometheus' text format, read at each request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.common import run_files
from services.common.http import Listener
from services.common.net import hosts
from services.common.prometheus import PLACE, Metric
from services.common.telemetry.metrics import ProcessStatus

log = structlog.get_logger()

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
OTHER = Metric("rollmill_other", "gauge", "A gauge of GetStatus that has no metric of its own.", own_labels=("gauge",))
METRICS = (INFO, ACTIVITY, LANES, OTHER)

Sample = tuple[Metric, tuple[str, ...], float]  # with the values of its metric's labels


def samples_of(gauges: Mapping[str, float], metrics: Sequence[Metric]) -> Iterator[Sample]:
    """Gauges as samples. The first metric whose source matches a gauge takes it, and ``OTHER`` what none does."""
    patterns = [(metric, _pattern(metric.source)) for metric in metrics if metric.source]
    for gauge, value in gauges.items():
        matches = ((metric, found.groups()) for metric, pattern in patterns if (found := pattern.fullmatch(gauge)))
        metric, labels = next(matches, (OTHER, (gauge,)))
        yield metric, labels, float(value)


@cache
def _pattern(source: str) -> re.Pattern[str]:
    parts = PLACE.split(source)  # text, label, text, label, ..., text
    return re.compile("".join(re.escape(part) if number % 2 == 0 else "(.+?)" for number, part in enumerate(parts)))


class MetricsServer:
    """Serves ``/metrics``: on loopback only, or with the run's keys to authorised roles."""

    def __init__(
        self,
        status: Callable[[], ProcessStatus],
        metrics: Sequence[Metric],
        *,
        name: str,
        host: str,
        port: int,
        run_dir: Path | None = None,
    ) -> None:
        """``name`` as in ``metrics.ports``. With a run directory its address is written there for Prometheus to find.

        Raises ``ConfigError`` for a host that may not be bound.
        """
        self._status = status
        self._metrics = metrics
        self._name = name
        self._host = host
        self._target = run_files.prometheus_target(run_dir, name) if run_dir is not None else None
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]  # has ``collect``
        ProcessCollector(registry=self._registry)
        application = web.Application()
        application.router.add_get("/metrics", self._answer)
        self._listener = Listener(
            application,
            host,
            port,
            name=f"metrics of {name}",
            setting=f"metrics.ports.{name}",
            group="metrics",
            leaving_cancels=False,
        )

    async def start(self) -> int:
        """Returns the port. Raises ``ConfigError`` for one that is taken."""
        port = await self._listener.start()
        if self._target is not None:
            self._write_target(self._target, port)
        return port

    async def stop(self) -> None:
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        await self._listener.stop()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Prometheus' view of the process, for its client."""
        families: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric, labels, value in self._samples():
            if metric not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric] = kind(metric.name, metric.help, labels=metric.labels)
            families[metric].add_metric(labels, value)
        return families.values()

    def _samples(self) -> Iterator[Sample]:
        now = self._status()
        yield INFO, (now.service, now.instance_id, now.run_id, now.state), 1.0
        for account in now.accounts:
            yield LANES, (account.component,), float(account.num_lanes)
            for activity in account.activities:
                yield ACTIVITY, (account.component, activity.name, activity.on), activity.seconds
        yield from samples_of(now.gauges, self._metrics)

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _write_target(self, target: Path, port: int) -> None:
        """In the format of ``file_sd_configs``; a full disk costs the entry, not the process."""
        now = self._status()
        labels = {"service": now.service, "instance": self._name, "run": now.run_id}
        if self._listener.is_secure:
            labels["__scheme__"] = "https"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            partial.write_text(json.dumps([{"targets": [hosts.address(self._host, port)], "labels": labels}]))
            partial.replace(target)
        except OSError as error:
            log.warning("metrics.target_not_written", path=str(target), error=str(error))

"""``GET /metrics`` of a process in Prometheus' text format, read at each request.

    Metric("rollmill_buffered_sequences", "gauge", "Sequences that wait for a batch.", "buffered/{policy}")

reads every gauge ``buffered/<anything>`` of ``GetStatus`` and gives each the label ``policy``. No fact has a second counter:
metrics are these gauges and the time accounts under conventional names (unit in the name, ``_total`` for counters). Imports
Prometheus and HTTP only where the recipe has metrics on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from services.common import run_files
from services.common.config.processes import MetricsConfig
from services.common.errors import ConfigError
from services.common.net import hosts
from services.common.telemetry.metrics import ProcessStatus

if TYPE_CHECKING:
    from aiohttp import web

    from services.common.rpc.server import Server

log = structlog.get_logger()

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
    parts = _PLACE.split(source)  # text, label, text, label, ..., text
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
        from aiohttp import web
        from prometheus_client import CollectorRegistry, ProcessCollector

        from services.common.http import Listener

        self._status = status
        self._metrics = metrics
        self._name = name
        self._host = host
        self._target = run_files.prometheus_target(run_dir, name) if run_dir is not None else None
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]  # has ``collect``; Collector is imported only here
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

    def collect(self) -> Iterable[Any]:
        """Prometheus' view of the process, for its client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
        from aiohttp import web
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

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


def metrics_server(
    config: MetricsConfig,
    status: Callable[[], ProcessStatus],
    metrics: Sequence[Metric],
    *,
    name: str,
    host: str,
    run_dir: Path | None,
) -> MetricsServer | None:
    """Serve the values of ``status`` under the names of ``metrics``; None where the recipe has metrics off.

    ``name`` as in ``metrics.ports``; ``host`` as for the process's other servers.

    Raises:
        ConfigError: metrics are on and their packages are not installed, or the host may not be bound.
    """
    if not config.enabled:
        return None
    try:
        return MetricsServer(status, metrics, name=name, host=host, port=config.ports.get(name, 0), run_dir=run_dir)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics.enabled needs the package {error.name}: pip install prometheus-client aiohttp, or set "
            "metrics.enabled to false"
        ) from None


async def serve_metrics(
    server: Server, config: MetricsConfig, metrics: Sequence[Metric], *, name: str, run_dir: Path | None
) -> None:
    """Serve metrics beside a gRPC server, of the same status and on the same host, until that stops.

    Raises:
        ConfigError: as ``metrics_server``, or the port is taken.
    """
    found = metrics_server(config, server.status, metrics, name=name, host=server.host, run_dir=run_dir)
    if found is not None:
        await found.start()
        server.on_stop(found.stop)

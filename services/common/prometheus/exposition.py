"""``GET /metrics`` of a process: its gauges and time accounts, read at each request, in Prometheus' text format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from services.common import run_files
from services.common.http.listener import Listener
from services.common.net import hosts
from services.common.prometheus.metric import INFO, Metric, Sample, Translation, account_samples
from services.common.telemetry.status import ProcessStatus

log = structlog.get_logger()

Family = GaugeMetricFamily | CounterMetricFamily


class StatusCollector(Collector):
    """Prometheus' view of a process, read at every scrape."""

    def __init__(self, status: Callable[[], ProcessStatus], metrics: Sequence[Metric]) -> None:
        self._status = status
        self._translation = Translation(metrics)

    def collect(self) -> Iterator[Family]:
        by_metric: dict[Metric, list[Sample]] = defaultdict(list)
        for sample in self._samples():
            by_metric[sample.metric].append(sample)
        for metric, samples in by_metric.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family: Family = kind(metric.name, metric.help, labels=metric.labels)
            for sample in samples:
                family.add_metric(sample.labels, sample.value)
            yield family

    def _samples(self) -> Iterable[Sample]:
        now = self._status()
        about = (now.service, now.instance_id, now.run_id, now.state)
        yield Sample(metric=INFO, labels=about, value=1.0)
        yield from account_samples(now.accounts)
        yield from self._translation.samples(now.gauges)


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
        self._name = name
        self._host = host
        self._target = run_files.prometheus_target(run_dir, name) if run_dir is not None else None
        self._registry = CollectorRegistry()
        self._registry.register(StatusCollector(status, metrics))
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
            self._write_target(port)
        return port

    async def stop(self) -> None:
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        await self._listener.stop()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _write_target(self, port: int) -> None:
        """In the format of ``file_sd_configs``; a full disk costs the entry, not the process."""
        assert self._target is not None
        now = self._status()
        labels = {"service": now.service, "instance": self._name, "run": now.run_id}
        if self._listener.is_secure:
            labels["__scheme__"] = "https"
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            partial = self._target.with_suffix(".partial")
            partial.write_text(json.dumps([{"targets": [hosts.address(self._host, port)], "labels": labels}]))
            partial.replace(self._target)
        except OSError as error:
            log.warning("metrics.target_not_written", path=str(self._target), error=str(error))

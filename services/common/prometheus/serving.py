"""Starts the metrics server of a process if the recipe has metrics on. Imports Prometheus and HTTP only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config.processes.services import MetricsConfig
from services.common.errors import ConfigError
from services.common.prometheus.metric import Metric
from services.common.telemetry.status import ProcessStatus

if TYPE_CHECKING:
    from services.common.prometheus.exposition import MetricsServer
    from services.common.rpc.server import Server


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
        from services.common.prometheus.exposition import MetricsServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics.enabled needs the package {error.name}: pip install prometheus-client aiohttp, or set "
            "metrics.enabled to false"
        ) from None
    return MetricsServer(status, metrics, name=name, host=host, port=config.ports.get(name, 0), run_dir=run_dir)


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

"""The metrics of a process, whose server is an extra (``extras/prometheus``).

    Metric("rollmill_buffered_sequences", "gauge", "Sequences that wait for a batch.", "buffered/{policy}")

reads every gauge ``buffered/<anything>`` of ``GetStatus`` and gives each the label ``policy``. No fact has a second counter:
metrics are these gauges and the time accounts under conventional names (unit in the name, ``_total`` for counters).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from services.common.config.processes import MetricsConfig
from services.common.errors import ConfigError
from services.common.extras import absent, provided
from services.common.telemetry.metrics import ProcessStatus

if TYPE_CHECKING:
    from services.common.rpc.server import Server

PLACE = re.compile(r"\{(\w+)\}")  # of a label in a source


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
        return tuple(PLACE.findall(self.source)) or self.own_labels


def metrics_server(
    config: MetricsConfig,
    status: Callable[[], ProcessStatus],
    metrics: Sequence[Metric],
    *,
    name: str,
    host: str,
    run_dir: Path | None,
) -> Any | None:
    """The server of the values of ``status`` under the names of ``metrics``, with ``start`` and ``stop``; None where the
    recipe has metrics off.

    ``name`` as in ``metrics.ports``; ``host`` as for the process's other servers.

    Raises:
        ConfigError: metrics are on and the extra or a package is not installed, or the host may not be bound.
    """
    if not config.enabled:
        return None
    if (path := provided("metrics").get("prometheus")) is None:
        raise ConfigError(f"{absent('metrics', 'prometheus')}, or set metrics.enabled to false")
    try:
        make = resolve_name(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics.enabled needs the package {error.name}: pip install prometheus-client aiohttp, or set "
            "metrics.enabled to false"
        ) from None
    return make(status, metrics, name=name, host=host, port=config.ports.get(name, 0), run_dir=run_dir)


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

"""Every metric of every kind of process: for the documentation, the dashboard, and tests. Imports nothing heavy."""

from __future__ import annotations

from services.common.prometheus.metric import Metric
from services.common.prometheus.process import METRICS as PROCESS
from services.envgateway.prometheus import METRICS as ENVGATEWAY
from services.envgateway.prometheus import WORKER_METRICS as WORKER
from services.inference.prometheus import METRICS as INFERENCE
from services.orchestrator.prometheus import METRICS as ORCHESTRATOR
from services.trainer.prometheus import METRICS as TRAINER
from services.trainer.prometheus import PUBLISHER_METRICS as PUBLISHER

CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "every process": PROCESS,
    "orchestrator": ORCHESTRATOR,
    "inference": INFERENCE,
    "trainer": TRAINER,
    "publisher": PUBLISHER,
    "envgateway": ENVGATEWAY,
    "worker": WORKER,
}


def markdown_table() -> str:
    """As docs/observability.md shows it."""
    rows = ["| process | metric | labels | |", "|---|---|---|---|"]
    for process, metrics in CATALOGUE.items():
        rows += [f"| {process} | `{m.name}` | {', '.join(m.labels)} | {m.help} |" for m in metrics]
    return "\n".join(rows) + "\n"


def names() -> set[str]:
    return {metric.name for metrics in CATALOGUE.values() for metric in metrics}

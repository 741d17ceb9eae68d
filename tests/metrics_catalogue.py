"""The metrics of every kind of process, from the code, and the metrics of a training step, from docs/observability.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from extras.farm.worker import METRICS as WORKER
from extras.prometheus.server import METRICS as PROCESS
from services.common.prometheus import Metric
from services.envgateway.app import METRICS as ENVGATEWAY
from services.inference.replica import METRICS as INFERENCE
from services.orchestrator.progress import METRICS as ORCHESTRATOR
from services.trainer.app import METRICS as TRAINER
from services.trainer.publisher import PUBLISHER_METRICS as PUBLISHER
from tests.documented import DOCS

CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "every process": PROCESS,
    "orchestrator": ORCHESTRATOR,
    "inference": INFERENCE,
    "trainer": TRAINER,
    "publisher": PUBLISHER,
    "envgateway": ENVGATEWAY,
    "worker": WORKER,
}
_STEP_TABLE = "| metric of a step | taken over | |\n|---|---|---|\n"
_STEP_ROW = re.compile(r"\| `([^`]+)` \| (.*?) \| (.*?) \|")


@dataclass(frozen=True, slots=True)
class StepMetric:
    """A row of the table: a number of a row ``training_step`` in metrics/orchestrator.jsonl."""

    name: str  # with the variable parts in braces
    of: str  # the population that it is taken over
    help: str

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"\{\w+\}", self.name)
        return re.compile("(.+)".join(re.escape(part) for part in parts))


def step_metrics() -> list[StepMetric]:
    """The rows of the documented table."""
    table = (DOCS / "observability.md").read_text().partition(_STEP_TABLE)[2].partition("\n\n")[0]
    rows = [_STEP_ROW.fullmatch(line) for line in table.splitlines()]
    assert rows and all(rows), "docs/observability.md has no table of step metrics, or a row of another form"
    return [StepMetric(*row.groups()) for row in rows if row is not None]


def is_documented(name: str) -> bool:
    """Whether the table has a row for a name in a row of a training step."""
    return any(metric.pattern.fullmatch(name) for metric in step_metrics())


def markdown_table() -> str:
    """The metrics of all processes, as docs/observability.md shows them."""
    rows = ["| process | metric | labels | |", "|---|---|---|---|"]
    for process, metrics in CATALOGUE.items():
        rows += [f"| {process} | `{m.name}` | {', '.join(m.labels)} | {m.help} |" for m in metrics]
    return "\n".join(rows) + "\n"

"""Bad inputs: rows of the table of bad inputs, most in several forms, with the verdicts that are right for each."""

from __future__ import annotations

from tests.integration.envgateway.cases import (
    containment,
    exchange,
    isolation,
    judging,
    native,
    processes,
    resources,
    sharing,
)
from tests.integration.envgateway.cases.model import Bad

TABLES: dict[str, list[Bad]] = {
    table.__name__.rpartition(".")[2]: table.CASES
    for table in (processes, resources, isolation, judging, native, containment, exchange, sharing)
}
ALL: list[Bad] = sorted((case for table in TABLES.values() for case in table), key=lambda case: case.number)

"""Bad inputs by table row; ``ALL`` in the order of the rows."""

from __future__ import annotations

from tests.integration.envgateway.cases import exchange, isolation, judging, native, processes, resources, sharing
from tests.integration.envgateway.cases.model import Bad

_TABLES = (processes, resources, isolation, judging, native, exchange, sharing)
ALL: list[Bad] = sorted((case for table in _TABLES for case in table.CASES), key=lambda case: case.number)

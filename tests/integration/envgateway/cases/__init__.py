"""Bad inputs by table row; ``ALL`` in the order of the rows."""

from __future__ import annotations

from . import exchange, isolation, judging, native, processes, resources
from .model import Bad

ALL: list[Bad] = sorted(
    [*processes.CASES, *resources.CASES, *isolation.CASES, *judging.CASES, *native.CASES, *exchange.CASES],
    key=lambda case: case.number,
)

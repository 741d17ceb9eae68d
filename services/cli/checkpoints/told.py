"""A warning about checkpoints that are damaged or could not be written, made from the counters of the run."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.checkpoints.gauges import CheckpointGauge


def checkpoint_warning(counters: Mapping[str, int]) -> str:
    """One line; empty where there is nothing to tell.

    >>> checkpoint_warning({"damaged_checkpoints": 1, "issued": 7})
    'checkpoints: 1 set aside as damaged (millrace checkpoints RUN)'
    """
    told = []
    if damaged := counters.get(CheckpointGauge.DAMAGED, 0):
        told.append(f"{damaged} set aside as damaged (millrace checkpoints RUN)")
    if failed := counters.get(CheckpointGauge.FAILED, 0):
        told.append(f"{failed} could not be written (checkpoint.failed in the trainer's log; is the disk full?)")
    return f"checkpoints: {'; '.join(told)}" if told else ""

"""Counters of a run that its records say again: what was counted between the newest journaled state and a kill.

A state is journaled every few seconds, with the counters of that moment; the records behind it have been counted by nobody who
is left. Counters that no record tells (stalls, lost leases, duplicates) stay as the state has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from services.common import fates
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.index import Row

RECOUNTED = ("task_groups_issued", "tokens_recorded", "slots_cancelled")
KINDS = (records.GROUP, records.TRAJECTORY, records.FAILURE)


def recount(row: Row, record: dict[str, Any], counter_of_failure: Callable[[str], str]) -> Counter[str]:
    """What one record of ``KINDS`` adds; raises what a record raises that cannot be read."""
    if row.kind == records.GROUP:
        return Counter(task_groups_issued=int(bool(record["replica_id"])))
    if row.kind == records.TRAJECTORY:
        sequences = rollouts.trajectory_from_json(record).sequences
        return Counter(tokens_recorded=sum(sequence.num_trained_tokens for sequence in sequences))
    reason = str(record["reason"])
    return Counter({"slots_cancelled" if reason == fates.TOO_OLD else counter_of_failure(reason): 1})

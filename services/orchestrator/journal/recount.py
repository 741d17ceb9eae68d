"""Counts records after the newest journaled state again, to restore the counters after a kill.

The orchestrator journals a state every few seconds, with the counters of that moment; the counts of later records are
lost with the process. Counters without records (stalls, lost leases, duplicates) keep the values of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from services.common.records import fates
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.storage.index import Row

KINDS = (records.GROUP, records.TRAJECTORY, records.FAILURE)


def recount(row: Row, record: dict[str, Any], counter_of_failure: Callable[[str], str]) -> Counter[str]:
    """Counts of one record of ``KINDS``; raises the errors of an unreadable record."""
    if row.kind == records.GROUP:
        return Counter(task_groups_issued=int(bool(record["replica_id"])))
    if row.kind == records.TRAJECTORY:
        sequences = rollouts.trajectory_from_json(record).sequences
        return Counter(tokens_recorded=sum(sequence.num_trained_tokens for sequence in sequences))
    reason = str(record["reason"])
    return Counter({"slots_cancelled" if reason == fates.TOO_OLD else counter_of_failure(reason): 1})

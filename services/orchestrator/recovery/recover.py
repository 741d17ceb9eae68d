"""Restores the parts of the orchestrator from the journal: applies the acknowledged records of earlier processes in
their order.

Reads only rows that still matter (``survey``). A damaged, unreadable or unusable record is set aside alone, and the run
continues as docs/journal.md says for its kind. Running slots belong to their replica for one more lease.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

from services.common.errors import ConfigError
from services.common.records.fates import SetAsideReason
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.journal import records
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.survey import rows_that_matter, survey
from services.orchestrator.recovery.applier import OUTCOMES, RecordApplier, UnusableRecordError
from services.orchestrator.recovery.completion import Completion
from services.orchestrator.recovery.parts import RecoveryParts

log = structlog.get_logger()

MOST_TRIES = 1000

Built = TypeVar("Built")


def recovered(
    build: Callable[[Quarantine], Built], parts_of: Callable[[Built], RecoveryParts], reader: JournalReader
) -> Built:
    """A built orchestrator with all usable records of the journal.

    ``build`` makes an empty one, with the set-aside records and a journal that is not started; ``parts_of`` returns its
    parts.

    Raises:
        ConfigError: recovery set aside as many unusable records as allowed, and found another.
    """
    aside = Quarantine.of(reader)
    for _ in range(MOST_TRIES):
        built = build(aside)
        parts = parts_of(built)
        try:
            recover(parts, reader)
            return built
        except UnusableRecordError as error:
            log.warning("run.recovers_again", without=str(error))
            parts.events.withdraw()
            _refuse(reader, error, aside)
    run_dir = parts.journal.directory.parent
    raise ConfigError(
        f"{MOST_TRIES} records of the journal in {run_dir} cannot be applied, one after another: look at them with "
        f"`rollmill journal {run_dir} list --content`, and begin another run from `rollmill export {run_dir}`"
    )


def _refuse(reader: JournalReader, error: UnusableRecordError, aside: Quarantine) -> None:
    """Set an unusable record aside. An outcome takes its task group along: a failed computation of statistics does not
    tell the outcome at fault."""
    aside.add(error.row, SetAsideReason.REFUSED, error.detail)
    if error.row.kind in OUTCOMES:
        name = error.row.key.rpartition("/")[0]
        for row in reader.rows_of(records.GROUP, name):
            aside.add(row, SetAsideReason.REFUSED, f"one of its outcomes cannot be applied: {error.detail}")


def recover(parts: RecoveryParts, reader: JournalReader) -> None:
    """Apply all records of the journal.

    Raises:
        UnusableRecordError: the parts are void; ``recovered`` tries again without the record.
    """
    observes = parts.training_orders.observes
    found = survey(reader, parts.aside, observes=observes, sources=parts.training_orders.streams)
    if not found.num_rows:
        return
    parts.pool.resumed = True
    applier = RecordApplier(parts, reader, found)
    for row in rows_that_matter(reader, found, observes=observes):
        applier.apply(row)
    Completion(parts=parts, reader=reader, found=found, owners=applier.owners, in_batches=applier.in_batches).run()
    log.info(
        LogEvent.RUN_RECOVERED,
        records=found.num_rows,
        task_groups=len(parts.groups),
        state=parts.control.state.value,
        set_aside=len(parts.aside),
    )

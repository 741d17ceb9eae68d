"""Set-aside records: damaged, unreadable or unusable ones, each named once in the journal itself.

A record is known by its number, so a later record of the same slot is valid; damaged bytes without a known record are
identified by their position. A start reads the set-aside records of earlier starts and does not check them again, so no
record is tried twice, and a restart alone does not grow the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import structlog

from services.common.records.fates import SetAsideReason
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import SetAside
from services.orchestrator.journal.storage.scan import Damage
from services.orchestrator.journal.storage.segments import Row
from services.orchestrator.journal.writer import Journal

log = structlog.get_logger()

_Identity = int | tuple[str, int, int]  # the record's number, else its kind, segment and offset

MOST_LOGGED = 20  # of one start; others are counted, and `rollmill journal RUN list` shows them


def _identity(number: int, kind: str, segment: int, offset: int) -> _Identity:
    return number or (kind, segment, offset)


class Quarantine:
    def __init__(self) -> None:
        self._known: dict[_Identity, SetAside] = {}
        self._new: dict[_Identity, SetAside] = {}  # of these, not in the journal yet

    @classmethod
    def of(cls, reader: JournalReader) -> Quarantine:
        """With the set-aside records of earlier processes."""
        found = cls()
        for row in reader.rows_of(records.SET_ASIDE):
            try:
                if (record := reader.load(row)) is not None:
                    noted = records.set_aside_from_json(record)
                    found._known[_identity(noted.number, noted.kind, noted.segment, noted.offset)] = noted
            except (KeyError, TypeError, ValueError):
                log.warning("journal.unreadable", kind=row.kind, segment=row.segment, offset=row.offset)
        return found

    def __contains__(self, row: Row) -> bool:
        return _identity(row.number, row.kind, row.segment, row.offset) in self._known

    def __iter__(self) -> Iterator[SetAside]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def add(self, row: Row, reason: SetAsideReason, detail: str = "") -> None:
        """Set a record aside; a repetition has no effect."""
        identity = _identity(row.number, row.kind, row.segment, row.offset)
        if identity in self._known:
            return
        noted = SetAside(
            kind=row.kind, key=row.key, number=row.number, segment=row.segment, offset=row.offset, reason=reason,
            detail=detail,
        )  # fmt: skip
        self._known[identity] = self._new[identity] = noted

    def add_span(self, span: Damage) -> Row:
        """Set an unreadable span aside; returns its row, as far as the span names one."""
        row = Row(span.number, span.kind, span.key, span.segment, span.offset, 0, 0)
        self.add(row, SetAsideReason.DAMAGED, str(span))
        return row

    def is_new(self, row: Row) -> bool:
        """Whether this process set the record aside."""
        return _identity(row.number, row.kind, row.segment, row.offset) in self._new

    def write(self, journal: Journal) -> None:
        """Write the records set aside since the last call to the journal and the log."""
        for noted in list(self._new.values())[:MOST_LOGGED]:
            log.error(LogEvent.RECORD_SET_ASIDE, **records.set_aside_to_json(noted))
        if self._new:
            log.error("journal.set_aside_in_all", records=len(self._new), see="rollmill journal RUN list --set-aside")
        for noted in self._new.values():
            record = records.set_aside_to_json(noted)
            journal.submit(records.SET_ASIDE, f"{noted.kind}/{noted.segment}/{noted.offset}", record.copy)
        self._new.clear()

    def counts(self) -> Counter[tuple[str, SetAsideReason]]:
        """Records by kind and reason."""
        return Counter((noted.kind, noted.reason) for noted in self._known.values())

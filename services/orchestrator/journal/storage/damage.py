"""Damage of a journal: unreadable bytes and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DamageReason(StrEnum):
    TORN = "torn"  # the segment ends inside a record
    UNREADABLE = "unreadable"  # bytes that are no record
    CHECKSUM = "checksum"  # a record whose contents differ from the written ones
    LOST = "lost"  # bytes that were there, and are gone
    REPEATED = "repeated"  # a record with the number of another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A span of a segment that is set aside. Its bytes stay where they are.

    >>> print(Damage(kind="versions", segment=2, offset=96, num_bytes=31, reason=DamageReason.TORN))
    versions-000002: 31 bytes at 96: torn
    """

    kind: str
    segment: int
    offset: int
    num_bytes: int
    reason: DamageReason
    num_records: int = 0  # as far as that is known
    number: int = 0  # of the record, where a single header names the record
    key: str = ""

    def __str__(self) -> str:
        told = f"{self.kind}-{self.segment:06d}: {self.num_bytes} bytes at {self.offset}: {self.reason.value}"
        if self.number:
            return f"{told} (record {self.number}, {self.key!r})"
        return f"{told} ({self.num_records} records)" if self.num_records else told

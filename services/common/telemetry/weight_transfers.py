"""Converts transfers of weight versions to rows of the metrics and back: the orchestrator writes them, tools read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from services.common.records import WeightTransfer

_FIELDS = frozenset(field.name for field in fields(WeightTransfer))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTransfer:
    """A transfer, and the replica that reports it: one row of ``RowKind.WEIGHT_TRANSFER``."""

    replica: str
    transfer: WeightTransfer

    def to_row(self) -> dict[str, Any]:
        """
        >>> ReportedTransfer(replica="a", transfer=WeightTransfer(policy="model0", version=3)).to_row()["replica"]
        'a'
        """
        return {"replica": self.replica, **asdict(self.transfer)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ReportedTransfer:
        """Fields that another release added are left out; those that it lacks have their defaults."""
        known = {name: value for name, value in row.items() if name in _FIELDS}
        return cls(replica=row["replica"], transfer=WeightTransfer(**known))

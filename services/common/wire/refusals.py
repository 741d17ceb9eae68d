"""Reasons why records are not taken, to and from the wire, in pairs."""

from __future__ import annotations

from services.common.pb import pool_pb2
from services.common.records.refusals import RefusalReason

_TO_PROTO = {
    reason: pool_pb2.RefusalReason.Value(f"REFUSAL_REASON_{reason.name}") for reason in RefusalReason
}  # every one: a test compares the two lists
_FROM_PROTO = {number: reason for reason, number in _TO_PROTO.items()}


def refusal_reason_to_proto(reason: RefusalReason) -> pool_pb2.RefusalReason.ValueType:
    return _TO_PROTO[reason]


def refusal_reason_from_proto(number: int) -> RefusalReason | None:
    """None for no reason, and for one that a newer orchestrator has."""
    return _FROM_PROTO.get(number)  # type: ignore[call-overload,no-any-return]

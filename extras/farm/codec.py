"""Jobs and results as bytes, for Redis: trees of plain data (``bare.plain``) in JSON, with two tags more.

["R", name, {field: tree, ...}] ["E", name, value]     a record, and a member of an enumeration, by the name of the class
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from services.common.errors import InvalidRequestError
from services.common.text.literals import to_tree
from services.envgateway.judge import records
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue import Job, JobResult
from services.envgateway.sandbox.bare.plain import from_tree
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult

_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ExecutionRequest, ExecutionLimits, ExecutionResult, JudgeRequest, JudgeResult, records.CaseResult,
        records.Comparison, records.StdinTests, records.StdinCase, records.CallTests, records.CallCase,
        records.AssertTests, records.ComparisonMode, RunStatus,
    )
}  # fmt: skip


def encode(record: Job | JobResult) -> bytes:
    """Escaped ASCII, so that lone surrogates in a program survive.

    >>> decode(encode(ExecutionRequest(code="print(1)"))).code
    'print(1)'
    """
    return json.dumps(_tree(record), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The job or the result. Raises ``InvalidRequestError`` for a record that another version may have written."""
    try:
        return _value(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"not of this version: {error!r}") from None


def _tree(value: Any) -> Any:
    name = type(value).__name__
    if dataclasses.is_dataclass(value):
        return ["R", name, {field.name: _tree(getattr(value, field.name)) for field in dataclasses.fields(value)}]
    if isinstance(value, enum.Enum):
        return ["E", name, value.value]
    return ["t", *map(_tree, value)] if isinstance(value, tuple) else to_tree(value)


def _value(tree: Any) -> Any:
    match tree:
        case ["R", name, fields]:
            return _CLASSES[name](**{field: _value(part) for field, part in fields.items()})
        case ["E", name, value]:
            return _CLASSES[name](value)
        case ["t", *parts]:
            return tuple(map(_value, parts))
    return from_tree(tree)

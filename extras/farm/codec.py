"""Jobs and results as bytes, for Redis: JSON with the name of each class under ``""``."""

from __future__ import annotations

import base64
import enum
import json
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from services.common.errors import InvalidRequestError
from services.common.text.literals import to_tree
from services.envgateway.judge import records
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue import Job, JobResult
from services.envgateway.sandbox.bare.plain import from_tree
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult

_RECORDS = {
    kind.__name__: kind
    for kind in (
        ExecutionRequest, ExecutionLimits, ExecutionResult, JudgeRequest, JudgeResult, records.CaseResult,
        records.Comparison, records.StdinTests, records.StdinCase, records.CallTests, records.CallCase,
        records.AssertTests,
    )
}  # fmt: skip
_DATA = (Any, tuple[Any, ...], dict[str, Any])  # values of calls: as trees, which keep types that JSON loses


def encode(record: Job | JobResult) -> bytes:
    """Escaped ASCII, so that lone surrogates in a program survive.

    >>> decode(encode(ExecutionRequest(code="print(1)"))).code
    'print(1)'
    """
    return json.dumps(_to_json(type(record), record), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The job or the result. Raises ``InvalidRequestError`` for a record that another version may have written."""
    try:
        return _from_json(Any, json.loads(data), is_data=False)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"not of this version: {error!r}") from None


@lru_cache(None)
def _hints(name: str) -> dict[str, Any]:
    return get_type_hints(_RECORDS[name])


def _to_json(hint: Any, value: Any) -> Any:
    if (kind := type(value).__name__) in _RECORDS:
        return {"": kind, **{name: _to_json(of, getattr(value, name)) for name, of in _hints(kind).items()}}
    if hint in _DATA:
        return to_tree(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return [_to_json(get_args(hint)[0], item) for item in value]
    return value


def _from_json(hint: Any, value: Any, is_data: bool = True) -> Any:
    if is_data and hint in _DATA:
        return from_tree(value)
    if isinstance(value, dict):
        hints = _hints(kind := value.pop(""))
        return _RECORDS[kind](**{name: _from_json(hints[name], part) for name, part in value.items()})
    if isinstance(value, list):
        return tuple(_from_json(get_args(hint)[0], item) for item in value)
    if isinstance(value, str):
        for kind in get_args(hint) or (hint,):
            if kind is bytes:
                return base64.b64decode(value)
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                return kind(value)
    return value

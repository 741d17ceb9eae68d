"""The ids that every call carries, so that the logs of two processes can be joined.

They are the ``run`` and ``request`` that the caller has bound to its logs (``services.common.telemetry.logs.bind``); the server
binds them for as long as the call lasts, so a call made on behalf of a call carries the same request id.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

Metadata = tuple[tuple[str, str], ...]

_KEYS = {"run": "x-run-id", "request": "x-request-id"}


def call_metadata(run_id: str = "", request_id: str = "") -> Metadata:
    """Metadata of one call; missing ids come from the logs' context, and a missing request id is created."""
    bound = structlog.contextvars.get_contextvars()
    ids = {
        "run": run_id or str(bound.get("run", "")),
        "request": request_id or str(bound.get("request", "")) or uuid.uuid4().hex,
    }
    # HTTP/2 refuses other characters, and a call must not fail for the sake of its log lines.
    return tuple(
        (_KEYS[name], value) for name, value in ids.items() if value and value.isascii() and value.isprintable()
    )


def completed(metadata: Iterable[tuple[str, Any]] | None) -> tuple[tuple[str, Any], ...]:
    """The given metadata, with the missing ids added."""
    given = tuple(metadata or ())
    keys = {key for key, _ in given}
    return given + tuple((key, value) for key, value in call_metadata() if key not in keys)


def ids_from_metadata(metadata: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """The ids by the names under which logs know them."""
    found = dict(metadata)
    return {name: found[key] for name, key in _KEYS.items() if key in found}

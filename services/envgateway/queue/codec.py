"""Jobs and results as bytes: JSON with a kind. Escaped ASCII, so that lone surrogates in a program survive."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from services.common.errors import InvalidRequestError
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue.base import Job, JobResult
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_JOBS = {"execute": ExecutionRequest, "judge": JudgeRequest}
_RESULTS = {"execute": ExecutionResult, "judge": JudgeResult}


def encode_job(job: Job) -> bytes:
    return _encode("judge" if isinstance(job, JudgeRequest) else "execute", job.to_json())


def decode_job(data: bytes) -> Job:
    """Raises ``InvalidRequestError`` for a record that another version of this program may have written."""
    job: Job = _built(_JOBS, data)
    return job


def encode_result(result: JobResult) -> bytes:
    return _encode("judge" if isinstance(result, JudgeResult) else "execute", result.to_json())


def decode_result(data: bytes) -> JobResult:
    """Raises ``InvalidRequestError`` for a record that another version of this program may have written."""
    result: JobResult = _built(_RESULTS, data)
    return result


def digest(data: bytes) -> str:
    """Tells different jobs under one key apart."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _encode(kind: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "value": value}, separators=(",", ":")).encode()


def _built(classes: dict[str, Any], data: bytes) -> Any:
    try:
        message = json.loads(data)
        return classes[message["kind"]].from_json(message["value"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"not of this version: {error!r}") from None

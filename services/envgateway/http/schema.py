"""Requests and answers of Code Judge's clients. Field names, types and defaults are their contract and must not change."""

from __future__ import annotations

import enum
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from services.common.errors import InvalidRequestError

SHOWN_CHARACTERS = 1000  # of each of stdout and stderr


def _made_id() -> str:
    return str(uuid.uuid4())


class Reason(enum.StrEnum):
    """Why a submission has no result of its own; empty when the program was judged, right or wrong."""

    NONE = ""
    INTERNAL_ERROR = "internal_error"
    WORKER_TIMEOUT = "worker_timeout"
    QUEUE_TIMEOUT = "queue_timeout"
    INVALID_INPUT = "invalid_input"


class Submission(BaseModel):
    """One program, or with type ``math`` one answer (``solution``) and the truth (``expected_output``)."""

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(BaseModel):
    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1)


class SubmissionOutcome(BaseModel):
    """``success``: exit code 0 and, where an output was expected, that output; ``run_success``: exit code 0."""

    sub_id: str = Field(default_factory=_made_id)
    success: bool = False
    run_success: bool = False
    cost: float = 0.0  # seconds
    stdout: str | None = None
    stderr: str | None = None
    reason: Reason = Reason.NONE

    def shown(self, with_output: bool) -> dict[str, Any]:
        """The fields of /run (with output) or of /judge (without)."""
        output = {"stdout": self.stdout, "stderr": self.stderr} if with_output else {}
        return {
            "sub_id": self.sub_id,
            "success": self.success,
            "run_success": self.run_success,
            "cost": self.cost,
            **output,
            "reason": self.reason.value,
        }


class UnreadableBodyError(InvalidRequestError):
    """``details`` has one entry per problem, as clients know them from a 422."""

    def __init__(self, details: list[dict[str, Any]]) -> None:
        super().__init__("the request is not of the schema")
        self.details = details


def read_submission(body: bytes) -> Submission:
    """Raises ``UnreadableBodyError``."""
    try:
        return Submission.model_validate_json(body)
    except ValidationError as error:
        raise UnreadableBodyError(_details(error)) from None


def read_batch(body: bytes) -> BatchSubmission:
    """Raises ``UnreadableBodyError``."""
    try:
        return BatchSubmission.model_validate_json(body)
    except ValidationError as error:
        raise UnreadableBodyError(_details(error)) from None


def batch_answer(sub_id: str | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sub_id": sub_id or _made_id(), "results": results}


def _details(error: ValidationError) -> list[dict[str, Any]]:
    return [
        {"type": problem["type"], "loc": ["body", *problem["loc"]], "msg": problem["msg"]}
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]

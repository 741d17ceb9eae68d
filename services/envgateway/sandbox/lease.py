"""Runs on their way to the supervisor, and the gateway's end of its channel."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.envgateway.sandbox.bare import wire
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionResult

# --- Jobs for the supervisor: a source, a mode, a profile and complete limits.


MAX_CODE_BYTES = 1 << 20
# A look at the text, not a parse: a false find costs some memory, a missed one the time of an import.
_SCIENTIFIC = re.compile(rb"^[ \t]*(?:import|from)[ \t][^\n#]*\b(?:numpy|sympy|mpmath)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Modes are those of ``bare.wire.MODES``."""

    mode: str
    profile: str
    source: bytes
    limits: dict[str, float | int] = field(default_factory=dict)
    stdin: bytes = b""
    payload: bytes = b""  # input of a harness


def profile_of(source: bytes) -> str:
    """The warm interpreter that suits a Python program.

    >>> profile_of(b"import math"), profile_of(b"from sympy import symbols")
    ('plain', 'scientific')
    """
    return "scientific" if _SCIENTIFIC.search(source) else "plain"


def why_unusable(code: str, language: str = "python") -> str:
    """Why a text cannot be a program's source; empty for a valid text."""
    if language not in ("python", "cpp"):
        return f"no language {language!r}; there are python and cpp"
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return f"the program is no text: {error}"
    return f"the program has {size} bytes, more than {MAX_CODE_BYTES}" if size > MAX_CODE_BYTES else ""


# --- The gateway's end of the supervisor's channel: sends requests, hands results to waiting callers.


_ids = itertools.count(1)
_OF_THE_FRAME = ("kind", "id", "status", "blobs")  # of a result; the other fields are those of the record


@dataclass(frozen=True, slots=True)
class RunMessage:
    """The answer of a live process to a question, with its output."""

    data: bytes
    stdout: bytes
    stderr: bytes
    interrupted: RunStatus | None  # TIME_LIMIT or OUTPUT_LIMIT, after an interruption
    truncated: bool


class SupervisorConnection(asyncio.Protocol):
    """Every run gets exactly one result: an INFRA_ERROR when the channel breaks, or is not open."""

    def __init__(self, why_closed: str = "the supervisor has gone") -> None:
        self._why_closed = why_closed
        self._frames = wire.FrameReader(orjson.loads)
        self._runs: dict[int, SubmittedRun] = {}
        self._transport: asyncio.WriteTransport | None = None  # None before and after

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def submit(self, job: Job) -> SubmittedRun:
        run = SubmittedRun(self, next(_ids))
        if self._transport is None:
            run.finish(_broken(self._why_closed))
            return run
        self._runs[run.id] = run
        head = {"kind": "run", "id": run.id, "mode": job.mode, "profile": job.profile, "limits": job.limits}
        self._write(head, [job.source, job.stdin, job.payload])
        return run

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def send(self, kind: str, run_id: int, data: bytes | None = None) -> None:
        """Send to a running run; without effect on another run."""
        if run_id in self._runs:
            self._write({"kind": kind, "id": run_id}, [] if data is None else [data])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for head, blobs in self._frames.feed(data):
            if head["kind"] == "said":
                if head["id"] in self._runs:
                    said, stdout, stderr = blobs
                    why = RunStatus(head["interrupted"]) if head["interrupted"] else None
                    message = RunMessage(said, stdout, stderr, why, head["truncated"])
                    self._runs[head["id"]].messages.put_nowait(message)
                continue
            run = self._runs.pop(head["id"], None)
            if run is not None:
                measured = {name: value for name, value in head.items() if name not in _OF_THE_FRAME}
                stdout, stderr, answer = blobs
                run.finish(
                    ExecutionResult(
                        status=RunStatus(head["status"]), stdout=stdout, stderr=stderr, answer=answer, **measured
                    )
                )

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for run in self._runs.values():
            run.finish(_broken("the supervisor died during the run"))
        self._runs.clear()

    def _write(self, head: dict[str, Any], blobs: list[bytes]) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(head, blobs, orjson.dumps))


class SubmittedRun:
    """A submitted run; ``result`` always completes."""

    def __init__(self, connection: SupervisorConnection, run_id: int) -> None:
        self._connection = connection
        self.id = run_id
        self.result: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        self.messages: asyncio.Queue[RunMessage | None] = asyncio.Queue()  # of a live process; None at its end

    def cancel(self) -> None:
        """Kill the run; the result still comes, as CANCELLED, when the slot is empty."""
        self._connection.send("cancel", self.id)

    def write(self, data: bytes) -> None:
        """Write to a live process."""
        self._connection.send("say", self.id, data)

    def finish(self, result: ExecutionResult) -> None:
        if not self.result.done():
            self.result.set_result(result)
        self.messages.put_nowait(None)


def _broken(why: str) -> ExecutionResult:
    return ExecutionResult(status=RunStatus.INFRA_ERROR, detail=why)

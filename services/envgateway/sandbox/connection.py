"""The gateway's end of the supervisor's channel: requests out, results to whoever waits for them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

from services.envgateway.sandbox.bare import wire
from services.envgateway.sandbox.jobs import Job
from services.envgateway.sandbox.records import ExecutionResult, ExecutionStatus

_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of what an interactive run says; of a live process also what else came of the question."""

    data: bytes
    stdout: bytes = b""
    stderr: bytes = b""
    interrupted: str = ""  # TIME_LIMIT or OUTPUT_LIMIT, when it was stopped to make it answer
    truncated: bool = False


class SupervisorConnection(asyncio.Protocol):
    """Every accepted run gets exactly one result: when the channel breaks, an INFRA_ERROR."""

    def __init__(self) -> None:
        self._frames = wire.FrameReader()
        self._runs: dict[int, SubmittedRun] = {}
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.lost.done()

    def submit(self, job: Job) -> SubmittedRun:
        run = SubmittedRun(self, next(_ids))
        if self._transport is None or self.lost.done():
            run.finish(_broken("the supervisor has gone"), b"")
            return run
        self._runs[run.id] = run
        self._write({"kind": "run", "id": run.id, **job.head}, [job.source, job.stdin, job.payload])
        return run

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def tell(self, kind: str, run_id: int, data: bytes | None = None) -> None:
        """About a run that has not ended; nothing happens about another."""
        if run_id in self._runs:
            self._write({"kind": kind, "id": run_id}, [] if data is None else [data])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for head, blobs in self._frames.feed(data):
            if head["kind"] == "said":
                if head["id"] in self._runs:
                    self._runs[head["id"]].said.put_nowait(_said(head, blobs))
                continue
            run = self._runs.pop(head["id"], None)
            if run is not None:
                run.finish(_result(head, blobs[0], blobs[1]), blobs[2])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        for run in self._runs.values():
            run.finish(_broken("the supervisor died during the run"), b"")
        self._runs.clear()

    def _write(self, head: dict[str, Any], blobs: list[bytes]) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(head, blobs))


class SubmittedRun:
    """A run on its way; ``result`` always completes, ``answer`` is complete with it."""

    def __init__(self, connection: SupervisorConnection, run_id: int) -> None:
        self._connection = connection
        self.id = run_id
        self.result: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        self.said: asyncio.Queue[Said | None] = asyncio.Queue()  # of an interactive run; None at its end
        self.answer = b""

    def cancel(self) -> None:
        """Kill it; the result still comes, as CANCELLED, when the slot is empty."""
        self._connection.tell("cancel", self.id)

    def say(self, data: bytes) -> None:
        """To the harness of an interactive run."""
        self._connection.tell("say", self.id, data)

    def finish(self, result: ExecutionResult, answer: bytes) -> None:
        self.answer = answer
        if not self.result.done():
            self.result.set_result(result)
        self.said.put_nowait(None)


def _said(head: dict[str, Any], blobs: list[bytes]) -> Said:
    if len(blobs) == 1:
        return Said(blobs[0])
    data, stdout, stderr = blobs
    return Said(data, stdout, stderr, head["interrupted"], head["truncated"])


def _broken(why: str) -> ExecutionResult:
    return ExecutionResult(status=ExecutionStatus.INFRA_ERROR, detail=why)


def _result(head: dict[str, Any], stdout: bytes, stderr: bytes) -> ExecutionResult:
    return ExecutionResult(
        status=ExecutionStatus(head["status"]),
        exit_code=head["exit_code"],
        signal=head["signal"],
        stdout=stdout,
        stderr=stderr,
        truncated=head["truncated"],
        wall_s=head["wall_s"],
        cpu_s=head["cpu_s"],
        peak_memory_bytes=head["peak_memory_bytes"],
        tier=head["tier"],
        detail=head["detail"],
        slot_s=head["slot_s"],
    )

"""The gateway's end of the supervisor's channel: requests out, results to whoever waits for them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from services.envgateway.sandbox.bare import wire
from services.envgateway.sandbox.records import ExecutionResult, ExecutionStatus

_ids = itertools.count(1)


class SupervisorConnection(asyncio.Protocol):
    """Every accepted run gets exactly one result: when the channel breaks, an INFRA_ERROR."""

    def __init__(self) -> None:
        self._frames = wire.FrameReader()
        self._waiting: dict[int, asyncio.Future[ExecutionResult]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.lost.done()

    def submit(self, code: bytes, stdin: bytes, limits: dict[str, float | int], echo: bool) -> _Submitted:
        run_id = next(_ids)
        result: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        if self._transport is None or self.lost.done():
            result.set_result(_broken("the supervisor has gone"))
            return _Submitted(self, run_id, result)
        self._waiting[run_id] = result
        head = {"kind": "run", "id": run_id, "limits": limits, "echo": echo}
        self._transport.write(wire.encode(head, [code, stdin]))
        return _Submitted(self, run_id, result)

    def cancel(self, run_id: int) -> None:
        if self._transport is not None and run_id in self._waiting:
            self._transport.write(wire.encode({"kind": "cancel", "id": run_id}))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for head, (stdout, stderr) in self._frames.feed(data):
            waiting = self._waiting.pop(head["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(_result(head, stdout, stderr))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(_broken("the supervisor died during the run"))
        self._waiting.clear()


class _Submitted:
    """A run on its way; ``result`` always completes."""

    def __init__(self, connection: SupervisorConnection, run_id: int, result: asyncio.Future[ExecutionResult]) -> None:
        self._connection = connection
        self._run_id = run_id
        self.result = result

    def cancel(self) -> None:
        """Kill it; the result still comes, as CANCELLED, when the slot is empty."""
        self._connection.cancel(self._run_id)


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
    )

"""Processes that live on between calls: code in, what it did out, the state kept.

Knows nothing of who asks. There is a fixed number of places, apart from the slots of programs; nobody waits for one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import time
from collections import Counter
from dataclasses import dataclass

from services.common.config.envgateway import LiveConfig, SandboxConfig
from services.common.errors import CapacityError
from services.envgateway.sandbox.bare.places import LIVE
from services.envgateway.sandbox.connection import Said, SubmittedRun
from services.envgateway.sandbox.jobs import Job, profile_of
from services.envgateway.sandbox.lease import LeaseOwner, SlotLease
from services.envgateway.sandbox.records import OPEN_FILES, ExecutionResult, ExecutionStatus

_FRAME = struct.Struct("!I")
_ANSWER_BYTES = 4096  # a frame has a number, an outcome and a name
_RETRY_S = 2.0
# Beyond a cell's own time: the fork server's start, the interruption's grace, a busy machine.
_BACKSTOP_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one piece of code did. ``alive`` is false when its process is gone, and with it what was defined there."""

    status: ExecutionStatus
    stdout: bytes = b""
    stderr: bytes = b""
    error: str = ""  # the type of what it raised
    wall_s: float = 0.0
    alive: bool = True
    detail: str = ""


class LiveSlots:
    """The places, as a ``LeaseOwner`` of their own in front of the pool's."""

    def __init__(self, pool: LeaseOwner, num: int) -> None:
        self._pool = pool
        self._num = num
        self._free = num
        self.config: SandboxConfig = pool.config
        self.has_cpp = False
        self.counts: Counter[str] = Counter()

    def lease(self) -> SlotLease:
        """A place, until the lease is left and its process has ended.

        Raises:
            CapacityError: all are taken; says when to come back.
        """
        if not self._free:
            self.counts["refused"] += 1
            raise CapacityError(f"all {self._num} live processes of the sandbox are in use", retry_after_s=_RETRY_S)
        self._free -= 1
        return SlotLease(self)

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {
            "live_processes": float(self._num - self._free),
            **{f"live_{k}": float(n) for k, n in self.counts.items()},
        }

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult:
        return await self._pool.submit(job)

    def count(self, result: ExecutionResult) -> ExecutionResult:
        self.counts[result.status.lower()] += 1
        return result

    def slot_is_empty(self, patient: bool) -> None:
        self._free += 1

    def kill_supervisor(self) -> None:
        self._pool.kill_supervisor()


class LiveProcess:
    """One process, asked one thing at a time. Cancelling the caller of ``run`` ends it."""

    def __init__(self, lease: SlotLease, run: SubmittedRun, config: LiveConfig) -> None:
        self._lease = lease
        self._run = run
        self._config = config
        self._numbers = itertools.count(1)

    @classmethod
    async def start(cls, slots: LiveSlots, config: LiveConfig, code: str) -> LiveProcess:
        """``code`` is what it will be asked first: its imports say which warm interpreter suits.

        Raises:
            CapacityError: all places are taken.
        """
        lease = slots.lease()
        try:
            profile = "scientific" if slots.config.prewarm_scientific else profile_of(code.encode(errors="replace"))
            limits = _limits(config, slots.config)
            job = Job(mode="cells", profile=profile, source=b"", interactive=True, place=LIVE, limits=limits)
            return cls(lease, await lease.start(job), config)
        except BaseException:
            lease.leave()
            raise

    @property
    def ended(self) -> ExecutionResult | None:
        """How the process has ended; None while it lives."""
        return self._run.result.result() if self._run.result.done() else None

    async def run(self, code: str) -> CellResult:
        """Run one cell. It is interrupted when it takes too long or prints too much, and killed where that does not help."""
        number = next(self._numbers)
        frame = json.dumps({"cell": number, "code": code}).encode()
        began = time.monotonic()
        self._run.say(_FRAME.pack(len(frame)) + frame)
        try:
            async with asyncio.timeout(self._config.cell_time_s + _BACKSTOP_S):
                result = await self._hear(number)
        except (TimeoutError, asyncio.CancelledError) as left:
            await self.close()
            if isinstance(left, TimeoutError):
                return CellResult(status=ExecutionStatus.INFRA_ERROR, alive=False, detail="the process does not answer")
            raise
        return _timed(result, time.monotonic() - began)

    async def close(self) -> None:
        """Kill it. The place is free when nothing of it is left."""
        self._run.cancel()
        self._lease.leave()

    async def _hear(self, number: int) -> CellResult:
        heard = b""
        stdout, stderr = bytearray(), bytearray()
        while (said := await self._run.said.get()) is not None:
            heard += said.data
            stdout += said.stdout
            stderr += said.stderr
            if len(heard) < _FRAME.size or len(heard) < _FRAME.size + _FRAME.unpack_from(heard)[0]:
                continue
            answer = _parsed(heard, number)
            if answer is None:
                break
            return CellResult(
                status=_status(said, answer),
                stdout=bytes(stdout),
                stderr=bytes(stderr),
                error=answer["error"],
            )
        await self.close()
        ended = await self._lease.wait(self._run, 0.0)
        status, detail = ended.status, ended.detail
        if status is ExecutionStatus.CANCELLED:  # by us, just now
            status, detail = ExecutionStatus.RUNTIME_ERROR, "the code wrote to the process's own channel"
        elif status is ExecutionStatus.OK:
            status, detail = ExecutionStatus.RUNTIME_ERROR, "the code ended its process"
        elif status is ExecutionStatus.RUNTIME_ERROR and ended.signal:
            detail = detail or f"the process died of signal {ended.signal}"
        return CellResult(
            status=status,
            stdout=bytes(stdout) + ended.stdout,
            stderr=bytes(stderr) + ended.stderr,
            alive=False,
            detail=detail or "the process ended",
        )


def _status(said: Said, answer: dict[str, str]) -> ExecutionStatus:
    if said.interrupted:
        return ExecutionStatus(said.interrupted)
    if said.truncated:
        return ExecutionStatus.OUTPUT_LIMIT
    if answer["outcome"] == "ok":
        return ExecutionStatus.OK
    return ExecutionStatus.MEMORY_LIMIT if answer["error"] == "MemoryError" else ExecutionStatus.RUNTIME_ERROR


def _parsed(heard: bytes, number: int) -> dict[str, str] | None:
    """The answer to cell ``number``; None for what our harness never writes: the code has used its descriptor."""
    try:
        answer = json.loads(heard[_FRAME.size :])
        if answer["cell"] != number or answer["outcome"] not in ("ok", "raised"):
            return None
        answer["error"].encode()  # no lone surrogate, which no message could carry
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return None
    return {"outcome": answer["outcome"], "error": answer["error"]}


def _timed(result: CellResult, wall_s: float) -> CellResult:
    fields = {name: getattr(result, name) for name in CellResult.__slots__}
    return CellResult(**{**fields, "wall_s": wall_s})


def _limits(config: LiveConfig, sandbox: SandboxConfig) -> dict[str, float | int]:
    return {
        "wall_s": config.lifetime_s,
        "cpu_s": config.cpu_time_s,
        "memory_bytes": config.memory_bytes,
        "processes": sandbox.num_processes,
        "output_bytes": config.output_bytes,
        "answer_bytes": _ANSWER_BYTES,
        "file_bytes": sandbox.file_bytes,
        "open_files": OPEN_FILES,
        "disk_bytes": sandbox.disk_bytes,
        "num_files": sandbox.num_files,
        "turn_s": config.cell_time_s,
    }

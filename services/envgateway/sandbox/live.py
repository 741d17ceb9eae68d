"""Live processes: code in, results out, the state kept between calls.

There is a fixed number of places, apart from the slots of programs; a caller never waits for a place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import struct
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.config.envgateway import LiveConfig, SandboxConfig
from services.common.errors import CapacityError
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import Job, LeaseOwner, RunMessage, SlotLease, SubmittedRun, profile_of
from services.envgateway.sandbox.records import NUM_FILES, OPEN_FILES, ExecutionResult

_FRAME = struct.Struct("!I")
_ANSWER_BYTES = 4096  # a frame has a number, an outcome and a name
_RETRY_S = 2.0
# Beyond a cell's own time: the fork server's start, the interruption's grace, a busy machine.
_BACKSTOP_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Result of one piece of code. ``alive`` is false when its process has ended, and all its definitions with the
    process."""

    status: RunStatus
    stdout: bytes = b""
    stderr: bytes = b""
    error: str = ""  # the type of the raised exception
    wall_s: float = 0.0
    alive: bool = True
    detail: str = ""


class LiveSlots:
    """The places of live processes, which are the supervisor's last slots."""

    def __init__(self, pool: LeaseOwner, num: int) -> None:
        self._pool = pool
        self._num = num
        self._free = num
        self.config: SandboxConfig = pool.config
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
        return SlotLease(self._pool, self._give_back, self._count)

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {
            "live_processes": float(self._num - self._free),
            **{f"live_{k}": float(n) for k, n in self.counts.items()},
        }

    def _count(self, result: ExecutionResult) -> None:
        self.counts[result.status.lower()] += 1

    def _give_back(self) -> None:
        self._free += 1


class LiveProcess:
    """One process that answers one question at a time. Cancelling the caller of ``run`` ends the process."""

    def __init__(self, lease: SlotLease, run: SubmittedRun, config: LiveConfig) -> None:
        self._lease = lease
        self._run = run
        self._config = config
        self._numbers = itertools.count(1)

    @classmethod
    async def start(
        cls,
        slots: LiveSlots,
        config: LiveConfig,
        code: str,
        *,
        profile: str = "",
        bounds: Mapping[str, float | int] | None = None,
    ) -> LiveProcess:
        """``code`` is the first question: its imports choose the warm interpreter, unless ``profile`` names one. ``bounds``
        go before the sandbox's limits.

        Raises:
            CapacityError: all places are taken.
        """
        lease = slots.lease()
        try:
            if not profile:
                profile = "scientific" if slots.config.prewarm_scientific else profile_of(code.encode(errors="replace"))
            limits = {**_limits(config, slots.config), **(bounds or {})}
            job = Job(mode="cells", profile=profile, source=b"", limits=limits)
            return cls(lease, await lease.start(job), config)
        except BaseException:
            lease.leave()
            raise

    @property
    def ended(self) -> ExecutionResult | None:
        """The result of an ended process; None while the process lives."""
        return self._run.result.result() if self._run.result.done() else None

    async def run(self, code: str) -> CellResult:
        """Run one cell. A cell that takes too long or prints too much is interrupted, and killed if the interruption
        fails."""
        number = next(self._numbers)
        frame = json.dumps({"cell": number, "code": code}).encode()
        began = time.monotonic()
        self._run.write(_FRAME.pack(len(frame)) + frame)
        try:
            async with asyncio.timeout(self._config.cell_time_s + _BACKSTOP_S):
                result = await self._read_result(number)
        except (TimeoutError, asyncio.CancelledError) as left:
            await self.close()
            if isinstance(left, TimeoutError):
                return CellResult(status=RunStatus.INFRA_ERROR, alive=False, detail="the process does not answer")
            raise
        return dataclasses.replace(result, wall_s=time.monotonic() - began)

    async def close(self) -> None:
        """Kill the process. The place is free when no process remains."""
        self._run.cancel()
        self._lease.leave()

    async def _read_result(self, number: int) -> CellResult:
        heard = b""
        stdout, stderr = bytearray(), bytearray()
        while (message := await self._run.messages.get()) is not None:
            heard += message.data
            stdout += message.stdout
            stderr += message.stderr
            if len(heard) < _FRAME.size or len(heard) < _FRAME.size + _FRAME.unpack_from(heard)[0]:
                continue
            answer = _parsed(heard, number)
            if answer is None:
                break
            return CellResult(
                status=_status(message, answer),
                stdout=bytes(stdout),
                stderr=bytes(stderr),
                error=answer["error"],
            )
        await self.close()
        ended = await self._lease.wait(self._run, 0.0)
        status, detail = ended.status, ended.detail
        if status is RunStatus.CANCELLED:  # by us, just now
            status, detail = RunStatus.RUNTIME_ERROR, "the code wrote to the process's own channel"
        elif status is RunStatus.OK:
            status, detail = RunStatus.RUNTIME_ERROR, "the code ended its process"
        elif status is RunStatus.RUNTIME_ERROR and ended.signal:
            detail = detail or f"the process died of signal {ended.signal}"
        return CellResult(
            status=status,
            stdout=bytes(stdout) + ended.stdout,
            stderr=bytes(stderr) + ended.stderr,
            alive=False,
            detail=detail or "the process ended",
        )


def _status(message: RunMessage, answer: dict[str, str]) -> RunStatus:
    if message.interrupted is not None:
        return message.interrupted
    if message.truncated:
        return RunStatus.OUTPUT_LIMIT
    if answer["outcome"] == "ok":
        return RunStatus.OK
    return RunStatus.MEMORY_LIMIT if answer["error"] == "MemoryError" else RunStatus.RUNTIME_ERROR


def _parsed(heard: bytes, number: int) -> dict[str, str] | None:
    """The answer to cell ``number``; None for a frame that our harness never writes: the code has used its descriptor."""
    try:
        answer = json.loads(heard[_FRAME.size :])
        if answer["cell"] != number or answer["outcome"] not in ("ok", "raised"):
            return None
        answer["error"].encode()  # no lone surrogate, which no message could carry
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return None
    return {"outcome": answer["outcome"], "error": answer["error"]}


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
        "num_files": NUM_FILES,
        "turn_s": config.cell_time_s,
    }

"""One slot's turn: the runs of one caller, one after the other."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
import structlog

from services.common.config.envgateway import SandboxConfig
from services.common.telemetry.metrics import Lane
from services.envgateway.sandbox.bare import wire
from services.envgateway.sandbox.bare.statuses import RunStatus, status_of_run
from services.envgateway.sandbox.bare.supervisor.places import PROGRAM
from services.envgateway.sandbox.records import ExecutionResult

# --- Jobs for the supervisor: a source, a mode, a profile and complete limits.


MAX_CODE_BYTES = 1 << 20
# A look at the text, not a parse: a false find costs some memory, a missed one the time of an import.
_SCIENTIFIC = re.compile(rb"^[ \t]*(?:import|from)[ \t][^\n#]*\b(?:numpy|sympy|mpmath)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. Modes are those of ``bare.messages.MODES``."""

    mode: str
    profile: str
    source: bytes
    limits: dict[str, float | int] = field(default_factory=dict)
    stdin: bytes = b""
    payload: bytes = b""  # input of a harness; the first messages of an interactive run
    interactive: bool = False
    lane: Lane = Lane.INTERACTIVE
    place: str = PROGRAM  # LIVE: apart from the slots of programs

    @property
    def head(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "profile": self.profile,
            "limits": self.limits,
            "interactive": self.interactive,
            "batch": self.lane is Lane.BATCH,
            "place": self.place,
        }


def profile_of(source: bytes) -> str:
    """The warm interpreter that suits a Python program.

    >>> profile_of(b"import math"), profile_of(b"from sympy import symbols")
    ('plain', 'scientific')
    """
    return "scientific" if _SCIENTIFIC.search(source) else "plain"


def why_unusable(code: str) -> str:
    """Why a text cannot be a program's source; empty for a valid text."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        return f"the program is no text: {error}"
    return f"the program has {size} bytes, more than {MAX_CODE_BYTES}" if size > MAX_CODE_BYTES else ""


# --- The gateway's end of the supervisor's channel: sends requests, hands results to waiting callers.


_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RunMessage:
    """A message of an interactive run; for a live process also the other results of the question."""

    data: bytes
    stdout: bytes = b""
    stderr: bytes = b""
    interrupted: RunStatus | None = None  # TIME_LIMIT or OUTPUT_LIMIT, after an interruption
    truncated: bool = False


class SupervisorConnection(asyncio.Protocol):
    """Every accepted run gets exactly one result: when the channel breaks, an INFRA_ERROR."""

    def __init__(self) -> None:
        self._frames = wire.FrameReader(orjson.loads)
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
                    self._runs[head["id"]].messages.put_nowait(_run_message(head, blobs))
                continue
            if head["kind"] == "age":
                if head["id"] in self._runs:
                    self._runs[head["id"]].tell_age(head["age_s"])
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
        self._transport.write(wire.encode(head, blobs, orjson.dumps))


class SubmittedRun:
    """A submitted run; ``result`` always completes, ``answer`` is complete with the result."""

    def __init__(self, connection: SupervisorConnection, run_id: int) -> None:
        self._connection = connection
        self.id = run_id
        self.result: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        self.messages: asyncio.Queue[RunMessage | None] = asyncio.Queue()  # of an interactive run; None at its end
        self._age: asyncio.Future[float | None] | None = None  # what ``age`` waits for
        self.answer = b""
        self._waiting: list[asyncio.Future[None]] = []
        self._on_end: Callable[[SubmittedRun], None] | None = None

    def when_ended(self, on_end: Callable[[SubmittedRun], None]) -> None:
        """Call this at the run's end, in the same round of the event loop; at once when the run has ended."""
        self._on_end = on_end
        if self.result.done():
            on_end(self)

    async def ended(self) -> ExecutionResult:
        """The run's result. Cancelling the waiting caller does not affect the run."""
        if not self.result.done():
            end = asyncio.get_running_loop().create_future()
            self._waiting.append(end)
            await end
        return self.result.result()

    def cancel(self) -> None:
        """Kill the run; the result still comes, as CANCELLED, when the slot is empty."""
        self._connection.send("cancel", self.id)

    async def age(self) -> float | None:
        """Seconds that the run has had its slot; None while the run waits for one. No answer comes after its end."""
        self._age = asyncio.get_running_loop().create_future()
        self._connection.send("age", self.id)
        return await self._age

    def tell_age(self, age_s: float | None) -> None:
        if self._age is not None and not self._age.done():
            self._age.set_result(age_s)

    def write(self, data: bytes) -> None:
        """Write to the harness of an interactive run."""
        self._connection.send("say", self.id, data)

    def finish(self, result: ExecutionResult, answer: bytes) -> None:
        self.answer = answer
        if not self.result.done():
            self.result.set_result(result)
            if self._on_end is not None:
                self._on_end(self)
        for end in self._waiting:
            if not end.done():
                end.set_result(None)
        self._waiting.clear()
        self.messages.put_nowait(None)


def _run_message(head: dict[str, Any], blobs: list[bytes]) -> RunMessage:
    if len(blobs) == 1:
        return RunMessage(blobs[0])
    data, stdout, stderr = blobs
    interrupted = head["interrupted"]
    return RunMessage(data, stdout, stderr, RunStatus(interrupted) if interrupted else None, head["truncated"])


def _broken(why: str) -> ExecutionResult:
    return ExecutionResult(status=RunStatus.INFRA_ERROR, detail=why)


def _result(head: dict[str, Any], stdout: bytes, stderr: bytes) -> ExecutionResult:
    return ExecutionResult(
        status=status_of_run(head["status"]),
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


log = structlog.get_logger()
_ANSWER_GRACE_S = 40.0  # a fork server's start, the wipe of a slot
_AGE_TIMEOUT_S = 5.0  # of a supervisor that is asked about a run


class LeaseOwner(Protocol):
    """Operations that a lease needs of its pool."""

    @property
    def config(self) -> SandboxConfig: ...
    @property
    def has_cpp(self) -> bool: ...

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult: ...
    def count(self, result: ExecutionResult) -> ExecutionResult: ...
    def kill_supervisor(self) -> None: ...


class SlotLease:
    """One slot's turn. The slot is free again when the holder has left and all its runs have ended."""

    def __init__(self, pool: LeaseOwner, lane: Lane, on_empty: Callable[[], None]) -> None:
        """``on_empty`` is called once, when no run uses the slot any more."""
        self._pool = pool
        self._lane = lane
        self._on_empty = on_empty
        self._live: set[SubmittedRun] = set()
        self._left = False
        self._given_back = False
        self.config = pool.config
        self.has_cpp = pool.has_cpp

    async def start(self, job: Job) -> SubmittedRun:
        """A run that has begun; the caller waits for its ``result``.

        An unavailable supervisor gives the result INFRA_ERROR.
        """
        submitted = await self._pool.submit(job if job.lane is self._lane else replace(job, lane=self._lane))
        if isinstance(submitted, ExecutionResult):
            failed = SubmittedRun(SupervisorConnection(), 0)
            failed.finish(self._pool.count(submitted), b"")
            return failed
        self._live.add(submitted)
        submitted.when_ended(self._ended)
        return submitted

    async def run(self, job: Job) -> SubmittedRun:
        """A run that has ended. Cancelling the caller kills the run."""
        run = await self.start(job)
        await self.wait(run, float(job.limits["wall_s"]))
        return run

    async def wait(self, run: SubmittedRun, limit_s: float) -> ExecutionResult:
        """The run's result. A supervisor that does not end the run within its limit and a grace is killed; the time that
        the run waits for a slot does not count."""
        loop = asyncio.get_running_loop()
        checks: list[asyncio.Task[None]] = []
        timer = loop.call_later(
            limit_s + _ANSWER_GRACE_S, lambda: checks.append(loop.create_task(self._check(run, limit_s)))
        )
        try:
            return await run.ended()
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            timer.cancel()
            for check in checks:
                check.cancel()

    async def _check(self, run: SubmittedRun, limit_s: float) -> None:
        """Ask about an overdue run until its end. After a kill of the supervisor the result comes from the broken
        channel."""
        while True:
            try:
                async with asyncio.timeout(_AGE_TIMEOUT_S):
                    age_s = await run.age()
            except TimeoutError:
                break
            left_s = limit_s + _ANSWER_GRACE_S - (age_s or 0.0)
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        log.error("sandbox.supervisor_stalled", waited_s=limit_s + _ANSWER_GRACE_S)
        self._pool.kill_supervisor()

    def leave(self) -> None:
        """No more runs; leaving twice is fine."""
        self._left = True
        self._release_when_empty()

    def _ended(self, run: SubmittedRun) -> None:
        self._pool.count(run.result.result())
        self._live.discard(run)
        self._release_when_empty()

    def _release_when_empty(self) -> None:
        if self._left and not self._live and not self._given_back:
            self._given_back = True
            self._on_empty()

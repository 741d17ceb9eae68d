"""Cases of one program that are run by one host: confined once, each case in a process of its own.

The host gives a record of each case that left no trace, and ends at the first other case (``bare.forkserver.host``). The judge
runs cases without a record alone. Expected values stay in the judge.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.envgateway.judge.frames import Frames
from services.envgateway.sandbox.bare import endings, messages
from services.envgateway.sandbox.bare.endings import CaseRecord
from services.envgateway.sandbox.bare.harness.calls import framed
from services.envgateway.sandbox.connection import SubmittedRun
from services.envgateway.sandbox.jobs import Job
from services.envgateway.sandbox.lease import SlotLease
from services.envgateway.sandbox.records import ExecutionResult

MOST_CASES = messages.MOST_INPUTS  # of one host
# that wait here and in the supervisor; a host with more ends, and its cases are run by themselves
_MOST_SAID_BYTES = 32 << 20
_HOST_S = 10.0  # beside the time of its cases: its start, and the messages between them


@dataclass(frozen=True, slots=True)
class HostedCase:
    """Input of a case for a host: its ``stdin``, or the ``call`` (entry_point, args, kwargs)."""

    limits: dict[str, float | int]
    stdin: bytes = b""
    call: dict[str, Any] | None = None

    def as_message(self, number: int) -> dict[str, Any]:
        needed = self.call if self.call is not None else {"input": number}
        return {"number": number, "output_bytes": self.limits["output_bytes"], **needed}


class CaseHost:
    """One host for cases of one program: ``start``, ``ask`` for more, ``end``. All are calls, or none is."""

    def __init__(
        self, slot: SlotLease, profile: str, source: bytes, cases: Sequence[HostedCase], budget_s: float, apart: bool
    ) -> None:
        """``budget_s``: no case is begun when the cases before have taken this long together. ``apart``: each case runs
        in a process of its own, for any text."""
        self._slot = slot
        self._num_cases, self._num_found = len(cases), 0
        limits = cases[0].limits
        self._wall_s = budget_s + float(limits["wall_s"]) + _HOST_S
        said = [2 * int(case.limits["output_bytes"]) + int(case.limits["answer_bytes"]) + 4096 for case in cases]
        self._said_bytes = min(sum(said), max(_MOST_SAID_BYTES, *said))
        settings = {name: limits[name] for name in ("cpu_s", "memory_bytes", "wall_s", "answer_bytes")} | {
            "budget_s": budget_s,
            "apart": apart,
            "cases": [case.as_message(number) for number, case in enumerate(cases)],
        }
        self._job = Job(
            mode="cases",
            profile=profile,
            source=source,
            payload=framed(json.dumps(settings).encode()),
            stdin=b"".join(case.stdin for case in cases),
            inputs=tuple(len(case.stdin) for case in cases) if cases[0].call is None else (),
            limits={**limits, "wall_s": self._wall_s, "answer_bytes": self._said_bytes},
            interactive=True,
        )
        self._run: SubmittedRun | None = None
        self._frames: Frames | None = None

    async def start(self, num_cases: int) -> list[CaseRecord]:
        """The records of the first cases, as ``ask``."""
        self._run = await self._slot.start(replace(self._job, payload=self._job.payload + _asking(num_cases)))
        self._frames = Frames(self._run, self._said_bytes)
        return await self._records()

    async def ask(self, num_cases: int) -> list[CaseRecord]:
        """The records of the next cases; fewer than asked for when the host has no record of a case, or no time left;
        more where further cases cost almost no time."""
        assert self._run is not None
        self._run.write(_asking(num_cases))
        return await self._records()

    async def _records(self) -> list[CaseRecord]:
        assert self._run is not None and self._frames is not None
        found: list[CaseRecord] = []
        try:
            async with asyncio.timeout(self._wall_s):
                while frame := await self._frames.next():
                    for record in endings.records(frame):
                        if record.number != self._num_found:
                            raise ValueError(f"a record of case {record.number} instead of {self._num_found}")
                        self._num_found += 1
                        found.append(record)
        except ValueError:  # no host writes this: its cases are run by themselves
            self._run.cancel()
        except TimeoutError:  # the supervisor does not answer, which the wait for the host's end says
            pass
        except asyncio.CancelledError:
            self._run.cancel()
            raise
        return found

    async def end(self) -> ExecutionResult:
        """End the host. Returns its result: COMPILE_ERROR for a source that does not compile; ``is_unfinished`` for
        cases to be run apart."""
        assert self._run is not None
        if self._num_found < self._num_cases:
            self._run.write(framed(b""))
        return await self._slot.wait(self._run, self._wall_s)


def _asking(num_cases: int) -> bytes:
    return framed(json.dumps({"cases": num_cases}).encode())


def is_unfinished(ended: ExecutionResult) -> bool:
    """Whether the cases without a record may still be run by one host, each in a process of its own: those before them were
    run in one, until one was not simply done."""
    return ended.exit_code == messages.UNFINISHED_EXIT or ended.signal == signal.SIGALRM


def result_of(record: CaseRecord, case: HostedCase, tier: str) -> ExecutionResult:
    """A case's record in the form of the supervisor's result."""
    end = record.ending(float(case.limits["cpu_s"]))
    return ExecutionResult(
        status=end.status,
        exit_code=end.exit_code,
        signal=end.signal,
        stdout=record.stdout,
        stderr=record.stderr,
        truncated=record.truncated,
        wall_s=record.wall_s,
        cpu_s=record.cpu_s,
        peak_memory_bytes=record.peak_memory_bytes,
        tier=tier,
        detail=end.detail,
        slot_s=record.wall_s,
    )

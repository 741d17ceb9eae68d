"""The gateway's own list of jobs without an answer: they are sent again when Redis has lost them.

Invariant: a job is listed from before its first sending until its answer or withdrawal, and only this list decides that
a job was answered; so a job may run twice, and is answered once. Of Redis only entry ids are known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.common.telemetry.gateway_queue import Lane

LOOKS_TO_BE_LOST = 2  # in a row: between two looks the results that were on their way have been read


@dataclass(eq=False, slots=True)
class Unanswered:
    """One job on its way. ``entry`` is its place in the stream; None before the sending."""

    id: str
    lane: Lane
    payload: bytes
    answer: asyncio.Future[bytes] = field(repr=False)
    entry: bytes | None = None
    missing: int = 0  # looks in a row that did not find the entry


class UnansweredJobs:
    """Unanswered jobs by id, and those of them that wait to be sent."""

    def __init__(self) -> None:
        self._jobs: dict[str, Unanswered] = {}
        self._unsent: dict[str, Unanswered] = {}
        self.something_to_send = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Unanswered) -> None:
        self._jobs[job.id] = job
        self.send_again([job])

    def answer(self, job_id: str, payload: bytes) -> bool:
        """Give an answer to the waiting caller; False when no caller waits: a second answer, or a withdrawn job."""
        job = self.forget(job_id)
        if job is None or job.answer.done():
            return False
        job.answer.set_result(payload)
        return True

    def forget(self, job_id: str) -> Unanswered | None:
        self._unsent.pop(job_id, None)
        return self._jobs.pop(job_id, None)

    def take_unsent(self, at_most: int) -> list[Unanswered]:
        """Jobs to send now, oldest first. Jobs that cannot be sent come back with ``send_again``."""
        taken = list(self._unsent.values())[:at_most]
        for job in taken:
            del self._unsent[job.id]
        if not self._unsent:
            self.something_to_send.clear()
        return taken

    def send_again(self, jobs: Iterable[Unanswered]) -> None:
        for job in jobs:
            if job.id in self._jobs:
                job.entry, job.missing = None, 0
                self._unsent[job.id] = job
        if self._unsent:
            self.something_to_send.set()

    def sent(self) -> list[Unanswered]:
        """Jobs that should be in Redis."""
        return [job for job in self._jobs.values() if job.entry is not None]

    def record_lookup(self, job: Unanswered, found: bool) -> bool:
        """Record whether the job's entry was found; True when the entry is lost and the job was queued for sending
        again."""
        if job.id not in self._jobs or job.entry is None:
            return False
        job.missing = 0 if found else job.missing + 1
        if job.missing < LOOKS_TO_BE_LOST:
            return False
        self.send_again([job])
        return True

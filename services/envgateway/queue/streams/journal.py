"""The gateway's own memory of jobs that have no answer yet: what is sent again when Redis has lost it.

Invariant: a job is here from before it is sent until it is answered or withdrawn, and nowhere else is it decided that
it was answered; so a job may run twice, and is answered once. Knows nothing of Redis but entry ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.envgateway.judge.records import Lane

LOOKS_TO_BE_LOST = 2  # in a row: between two looks the results that were on their way have been read


@dataclass(eq=False, slots=True)
class Unanswered:
    """One job on its way. ``entry`` is its place in the stream; None while it is not sent."""

    id: str
    lane: Lane
    payload: bytes
    answer: asyncio.Future[bytes] = field(repr=False)
    entry: bytes | None = None
    missing: int = 0  # looks in a row that did not find the entry


class Journal:
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
        """Give an answer to who waits; False when nobody does: a second answer, or to a withdrawn job."""
        job = self.forget(job_id)
        if job is None or job.answer.done():
            return False
        job.answer.set_result(payload)
        return True

    def forget(self, job_id: str) -> Unanswered | None:
        self._unsent.pop(job_id, None)
        return self._jobs.pop(job_id, None)

    def take_unsent(self, at_most: int) -> list[Unanswered]:
        """Jobs to send now, oldest first. What cannot be sent comes back with ``send_again``."""
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
        """Those that should be in Redis."""
        return [job for job in self._jobs.values() if job.entry is not None]

    def looked(self, job: Unanswered, found: bool) -> bool:
        """Note a look for its entry; True when it is lost and was put up for sending again."""
        if job.id not in self._jobs or job.entry is None:
            return False
        job.missing = 0 if found else job.missing + 1
        if job.missing < LOOKS_TO_BE_LOST:
            return False
        self.send_again([job])
        return True

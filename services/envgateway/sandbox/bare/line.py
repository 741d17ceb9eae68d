"""Programs that were sent before a slot was free for them, so that the next begins in the moment when one has ended.

Urgent ones go first and may use every slot; patient ones leave one to the urgent. Knows nothing of what runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from .run import Limits


@dataclass(slots=True)
class Request:
    """A run as the gateway asked for it; what is said to it meanwhile is added to ``payload``, its first words."""

    head: dict[str, Any]
    limits: Limits
    source: bytes
    stdin: bytes
    payload: bytes


class Line:
    """``add`` what comes, ``take`` what may begin, tell what has ``ended``."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._most_patient = max(1, num_slots - 1)
        self._urgent: deque[Request] = deque()
        self._patient: deque[Request] = deque()
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, bool] = {}  # whether it is patient, by the run's id
        self._patient_running = 0

    def add(self, request: Request) -> None:
        (self._patient if request.head["patient"] else self._urgent).append(request)
        self._waiting[request.head["id"]] = request

    def take(self) -> Request | None:
        """The next that may begin now."""
        if len(self._running) >= self._num_slots:
            return None
        if self._urgent:
            request = self._urgent.popleft()
        elif self._patient and self._patient_running < self._most_patient:
            request = self._patient.popleft()
        else:
            return None
        run_id, patient = request.head["id"], bool(request.head["patient"])
        del self._waiting[run_id]
        self._running[run_id] = patient
        self._patient_running += patient
        return request

    def ended(self, run_id: int) -> None:
        """Its slot is empty. Runs that never stood here are none of ours."""
        self._patient_running -= self._running.pop(run_id, False)

    def find(self, run_id: int) -> Request | None:
        """One that waits."""
        return self._waiting.get(run_id)

    def remove(self, run_id: int) -> bool:
        """It is no longer wanted; False when it does not wait."""
        request = self._waiting.pop(run_id, None)
        if request is None:
            return False
        (self._patient if request.head["patient"] else self._urgent).remove(request)
        return True

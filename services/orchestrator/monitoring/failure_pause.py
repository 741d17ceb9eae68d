"""Pauses the run when a broken reward, a lost gateway or failing machinery would use up the dataset.

After the loss of a peer that replicas could not reach, such as a gateway on a restarted machine, the run resumes by itself
when the replicas reach the peer again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from services.common.records.fates import RunCount
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.ingest.ingest import Ingest
from services.orchestrator.ingest.masked import MaskedSamples
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.stalls.facts import PAUSED_ITSELF, Hold
from services.orchestrator.state.run_control import RunControl

log = structlog.get_logger()

LEAST_FAILURES = 256
FAILED_GROUPS = 16


class FailurePause:
    def __init__(
        self,
        control: RunControl,
        dispatcher: Dispatcher,
        ingest: Ingest,
        masked: MaskedSamples,
        pool: ReplicaPool,
        counters: Counter[str],
        *,
        group_size: int,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._control = control
        self._dispatcher = dispatcher
        self._ingest = ingest
        self._masked = masked
        self._pool = pool
        self._counters = counters
        self._limit = max(LEAST_FAILURES, FAILED_GROUPS * group_size)  # failures in a row
        self._pause = pause
        self._resume = resume
        self._paused = False
        self._unreachable: frozenset[str] = frozenset()  # peers that were silent at the pause

    def check(self) -> None:
        """Pause or resume the run if needed; the caller repeats this every second."""
        if self._paused:
            self._resume_if_reached()
            return
        all_fail = self._ingest.failures_in_a_row >= self._limit
        why = self._all_failed() if all_fail else self._masked.too_many()
        if not why or self._control.paused or self._control.ended:
            return
        self._paused = True
        self._unreachable = self._peers(silent=True)
        self._counters[RunCount.PAUSES_FOR_FAILURES.value] += 1
        reason = f"{why}, the newest with {self._ingest.last_failure}; fix the cause, then run `rollmill resume`"
        if self._unreachable:
            reason += f" (by itself once replicas hear of {', '.join(sorted(self._unreachable))} again)"
        log.error("run.paused", reason=reason)
        # Ahead of the pause, so that people see this reason.
        self._dispatcher.hold(Hold.ALL_FAIL if all_fail else Hold.MASKED, reason)
        self._pause()

    def _resume_if_reached(self) -> None:
        if self._unreachable and self._unreachable <= self._peers(silent=False):
            log.info("run.resumed", reason=f"heard again: {', '.join(sorted(self._unreachable))}")
            self._resume()
        if self._control.paused:
            return
        self._ingest.failures_in_a_row = 0  # also after a user resumed the run
        self._masked.forget()
        self._paused = False
        for held in PAUSED_ITSELF:
            self._dispatcher.hold(held, "")

    def _all_failed(self) -> str:
        return f"the last {self._ingest.failures_in_a_row} rollouts all failed"

    def _peers(self, *, silent: bool) -> frozenset[str]:
        """Dependencies of replicas: unreachable for some of the replicas, or for all replicas that report on them."""
        known = [peer for replica in self._pool for peer in replica.peers]
        unheard = frozenset(peer.component for peer in known if peer.silent_s > 0.0)
        return unheard if silent else frozenset(peer.component for peer in known) - unheard

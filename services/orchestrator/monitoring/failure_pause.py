"""Pauses the run when a broken reward, a lost gateway or failing machinery would use up the dataset, or a trainer refuses
its batch because the engines compute other log-probabilities.

Ends the run instead when no rollout has ever succeeded, or the recipe itself is wrong: no resume repairs that. The journal
does not record such an end, so `rollmill run --resume` continues the run with a repaired workflow, reward or setting.
After the loss of a peer that replicas could not reach, such as a gateway on a restarted machine, the run resumes by itself
when the replicas reach the peer again. After failures of other machinery, such as a judge that still loads, it tries again
after ``RETRY_S``. After ``PATIENCE_S`` without a success it tries once more; the next pause is one that a person ends and
that ``PAUSES_FOR_FAILURES`` counts, or the run ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import structlog

from services.common.errors import ConfigError, ModelMismatchError, UnknownPolicyError
from services.common.records.fates import RunCount
from services.common.records.masked import MaskedCause, cause_of
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.ingest import Ingest, MaskedSamples
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.trainers import TrainerLeases
from services.orchestrator.stalls.facts import PAUSED_ITSELF, Hold
from services.orchestrator.state.run_control import RunControl

log = structlog.get_logger()

LEAST_FAILURES = 256
FAILED_GROUPS = 16
RETRY_S = 60.0
PATIENCE_S = 600.0  # from the first pause after a success
PASSING = {
    MaskedCause.CAPACITY, MaskedCause.DEADLINE, MaskedCause.EPISODE_LOST, MaskedCause.INFRASTRUCTURE,
    MaskedCause.INVALID_RECORD,  # of one faulty replica, beside which others may join
    MaskedCause.REPLICA_LOST,
}  # fmt: skip
LASTING = tuple(f"{error.reason}: " for error in (ConfigError, ModelMismatchError, UnknownPolicyError))


class FailurePause:
    def __init__(
        self,
        control: RunControl,
        dispatcher: Dispatcher,
        ingest: Ingest,
        masked: MaskedSamples,
        pool: ReplicaPool,
        trainers: TrainerLeases,
        counters: Counter[str],
        *,
        group_size: int,
        pause: Callable[[], None],
        resume: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._control = control
        self._dispatcher = dispatcher
        self._ingest = ingest
        self._masked = masked
        self._pool = pool
        self._trainers = trainers
        self._counters = counters
        self._limit = max(LEAST_FAILURES, FAILED_GROUPS * group_size)  # failures in a row
        self._pause = pause
        self._resume = resume
        self._clock = clock
        self._paused = False
        self._num_tokens = -1  # recorded by the last pause
        self._patient_until = 0.0
        self._retry_at = math.inf
        self._unreachable: frozenset[str] = frozenset()  # peers that were silent at the pause

    def check(self) -> None:
        """Pause or resume the run if needed; the caller repeats this every second.

        Raises ``ConfigError`` to end a run in which no rollout can succeed.
        """
        if self._paused:
            self._resume_by_itself()
            return
        refusal = "; ".join(trainer.refusal for trainer in self._trainers if trainer.refusal)
        all_fail = not refusal and self._ingest.failures_in_a_row >= self._limit
        streak = f"the last {self._ingest.failures_in_a_row} rollouts all failed"
        why = refusal or (streak if all_fail else self._masked.too_many())
        if not why or self._control.paused or self._control.ended:
            return
        now, num_tokens = self._clock(), self._counters[RunCount.TOKENS_RECORDED.value]
        if num_tokens != self._num_tokens:
            self._num_tokens, self._patient_until = num_tokens, now + PATIENCE_S
        self._unreachable = frozenset() if refusal else self._peers(silent=True)
        passes = all_fail and cause_of(self._ingest.last_failure.partition(":")[0]) in PASSING
        by_itself = not refusal and now < self._patient_until and (passes or bool(self._unreachable))
        newest = f"the newest with {self._ingest.last_failure}"
        if all_fail and not by_itself and (not num_tokens or self._ingest.last_failure.startswith(LASTING)):
            before = "" if num_tokens else "no rollout of this run has succeeded: "
            raise ConfigError(
                f"{before}{why}, {newest}; `rollmill fate RUN` counts the failures, and RUN/logs has the tracebacks. Fix the cause, "
                "then go on: `rollmill run --resume RUN`"
            )
        self._paused = True
        self._retry_at = math.inf if not by_itself else self._patient_until if self._unreachable else now + RETRY_S
        self._counters[RunCount.PAUSES_FOR_FAILURES.value] += not by_itself
        reason = refusal or f"{why}, {newest}; fix the cause, then run `rollmill resume`"
        if self._unreachable:
            reason += f" (by itself once replicas hear of {', '.join(sorted(self._unreachable))} again)"
        elif by_itself:
            reason += f" (by itself after {RETRY_S:g} s)"
        log.error("run.paused", reason=reason)
        # Ahead of the pause, so that people see this reason.
        self._dispatcher.hold(Hold.NUMERICS if refusal else Hold.ALL_FAIL if all_fail else Hold.MASKED, reason)
        self._pause()

    def _resume_by_itself(self) -> None:
        if (self._unreachable and self._unreachable <= self._peers(silent=False)) or self._clock() >= self._retry_at:
            log.info("run.resumed", unreachable_before=sorted(self._unreachable))
            self._resume()
        if self._control.paused:
            return
        self._ingest.failures_in_a_row = 0  # also after a user resumed the run
        self._masked.forget()
        self._paused = False
        for held in PAUSED_ITSELF:
            self._dispatcher.hold(held, "")

    def _peers(self, *, silent: bool) -> frozenset[str]:
        """Dependencies of replicas: unreachable for some of the replicas, or for all replicas that report on them."""
        known = [peer for replica in self._pool for peer in replica.peers]
        unheard = frozenset(peer.component for peer in known if peer.silent_s > 0.0)
        return unheard if silent else frozenset(peer.component for peer in known) - unheard

"""Checks the facts of a record beside tokens and rewards: names, metrics, times, and the actions of the rollout.

Times affect no decision but have bounds: they enter the journal, metrics and traces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from services.common.records.refusals import Refusal
from services.common.records.refusals import RefusalReason as Reason
from services.common.records.types import NO_TIMING, RolloutFailure, RolloutTiming, Trajectory

MOST_NAME = 128  # characters
MOST_METRICS, MOST_METRIC = 256, 1e15
MOST_PHASES, MOST_PHASE_DETAIL = 1024, 1024
MOST_COUNT = 1_000_000  # of sends and retries
MOST_REASON, MOST_DETAIL = 64, 8192  # characters of a failure, which is cut
LAST_INSTANT = 253_402_300_800.0  # the year 10000, where protobuf's instants end
CLOCK_STEP_S = 86_400.0  # a clock may be set back while a rollout is played


class RecordRefusedError(Exception):
    """A value of a record is beyond its bound. ``Ingest`` catches this and reports the reason to the sender."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason=reason, detail=detail)


def refuse(reason: Reason, detail: str) -> NoReturn:
    """Raises RecordRefusedError."""
    raise RecordRefusedError(reason, detail)


def shown(text: str) -> str:
    """A peer's text for a message, cut."""
    return repr(text if len(text) <= MOST_NAME else f"{text[:MOST_NAME]}...")


def check_name(text: str, what: str) -> None:
    """Raises RecordRefusedError for a name that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        refuse(Reason.NAME, f"{what} is {shown(text)}: a name has 1 to {MOST_NAME} printable characters")


def check_metrics(metrics: Mapping[str, float], what: str) -> None:
    """Raises RecordRefusedError for too many metrics, or one that is not finite or too large."""
    if len(metrics) > MOST_METRICS:
        refuse(Reason.METRIC, f"{what} has {len(metrics)} metrics; at most {MOST_METRICS} are taken")
    for name, value in metrics.items():
        check_name(name, "a metric")
        if not -MOST_METRIC <= value <= MOST_METRIC:  # NaN too
            refuse(Reason.METRIC, f"the metric {name} of {what} is {value:g}; at most {MOST_METRIC:g} is taken")


def check_times(trajectory: Trajectory) -> None:
    """Raises RecordRefusedError for impossible times. A clock that is set back by less than a day costs no record."""
    if not _times_fit(trajectory.started_at, trajectory.finished_at):
        refuse(
            Reason.TIME,
            f"the rollout began at {trajectory.started_at:g} and ended at {trajectory.finished_at:g} (seconds since 1970)",
        )
    if fault := _fault_of_timing(trajectory.timing):
        refuse(Reason.TIME, fault)


def _times_fit(started_at: float, finished_at: float) -> bool:
    ordered = not started_at or not finished_at or finished_at >= started_at - CLOCK_STEP_S
    return _is_instant(started_at) and _is_instant(finished_at) and ordered


def _is_instant(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds < LAST_INSTANT


def _fault_of_timing(timing: RolloutTiming) -> str:
    """The error in the actions of a rollout and their times; empty for valid ones."""
    if not (_is_instant(timing.accepted_at) and _is_instant(timing.sent_at)):
        return f"the order came at {timing.accepted_at:g}, and the record was sent at {timing.sent_at:g}"
    if not (0 <= timing.num_sends <= MOST_COUNT and 0 <= timing.num_retries <= MOST_COUNT):
        return f"the record was sent {timing.num_sends} times and retried {timing.num_retries} times"
    if len(timing.phases) > MOST_PHASES:
        return f"the rollout has {len(timing.phases)} phases; at most {MOST_PHASES} are taken"
    for phase in timing.phases:
        if not (
            0 < len(phase.what) <= MOST_NAME
            and len(phase.policy) <= MOST_NAME
            and len(phase.detail) <= MOST_PHASE_DETAIL
            and 0 <= phase.begin_s < LAST_INSTANT
            and 0 <= phase.seconds < LAST_INSTANT
            and phase.num_tokens >= 0
            and phase.first_version >= -1
            and phase.last_version >= -1
        ):
            return f"a phase of the rollout ({shown(phase.what)}) has a name, time or number that cannot be"
    return ""


def bounded_failure(failure: RolloutFailure) -> RolloutFailure:
    """The failure with values beyond a bound cut or dropped. Refuses no failure: a refusal would be a failure, too."""
    fits = _times_fit(failure.started_at, failure.finished_at)
    timed = not _fault_of_timing(failure.timing)
    if fits and timed and len(failure.reason) <= MOST_REASON and len(failure.detail) <= MOST_DETAIL:
        return failure
    return replace(
        failure,
        reason=failure.reason[:MOST_REASON],
        detail=failure.detail[:MOST_DETAIL],
        started_at=failure.started_at if fits else 0.0,
        finished_at=failure.finished_at if fits else 0.0,
        timing=failure.timing if timed else NO_TIMING,
    )

"""Checks incoming records against every bound, makes them durable, then reports the outcome of their slots.

    sender: owner of the slot, now or before? -> slot open? -> within every bound? -> journal -> answer
            no: refused                          no: duplicate, unknown   no: the slot fails

Invariants: the first durable record of a slot wins. The answer to a record follows after that record, or the record
that it repeats, is durable. Unknown and repeated records, records beyond a bound and records of other senders get a
reason and a count, never an exception. A replica without a lease may still send records of slots that it owned.
Independent of grpc and of later uses of a slot.

This is the only place that checks the values of a record: what is in the journal can be applied and trained. A check
takes a few microseconds per segment, over whole arrays. The bounds come from the policies, the sampling and the recipe:

    token ids      the rows of the policy's embedding (its config.json; its trainer when it joins)
    lengths        sampling.max_new_tokens of the order, policies.<name>.model.context_length, the largest message
    counts         workflow.settings.max_sequences, and constants that lie far above the counts of workflows
    magnitudes     constants below; the inputs of the policy's advantage
    times          affect no decision but have bounds, because they enter the journal, metrics and traces

docs/protocol.md has the table.
"""

from __future__ import annotations

import enum
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import structlog

from services.common import kept_tokens
from services.common import records as fates
from services.common.config.recipe import Recipe
from services.common.errors import InvalidRequestError
from services.common.kept_tokens import MaskedCause, MaskedCount, cause_of
from services.common.records import (
    LEAST_TRAINED_TEMPERATURE,
    NO_TIMING,
    TOO_OLD,
    Interval,
    Logprobs,
    PhaseKind,
    Purpose,
    Refusal,
    RefusalReason,
    RolloutFailure,
    RolloutTiming,
    Segment,
    TaskGroupOrder,
    TokenSequence,
    TokenSource,
    Trajectory,
    WeightVersion,
    counter_of,
)
from services.common.rpc.interceptors import REQUEST_BYTES
from services.common.telemetry.logs import LogEvent, Repeats
from services.orchestrator.groups import GroupBy, Incarnation, Outcome, TaskGroup, group_key
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from services.orchestrator.members import Held
from services.orchestrator.versions import VersionLedger

log = structlog.get_logger()

INVALID_RECORD = kept_tokens.INVALID_RECORD
OF_A_REPLICA = "REPLICA_"  # prefix of a reason that only the orchestrator gives, when a replica sends that reason
MOST_COUNTERS = 256
_REASON = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

MOST_SENDERS = 1024
MOST_SHOWN = 64  # characters of a peer's word in the log
OTHERS = "others"


@dataclass(slots=True)
class Streak:
    """Refusals of one sender since its last accepted record."""

    number: int
    since: float  # on the caller's clock
    newest: float
    last: Refusal


class Refusals:
    """Refusals, counted by reason and by sender, logged at intervals, and reported as a stall. Peers choose the names of
    senders, so at most ``MOST_SENDERS`` are kept."""

    def __init__(self, counters: Counter[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``counters`` are the run's, which outlive the process."""
        self._counters = counters
        self._clock = clock
        self._repeats = Repeats(clock)
        self.streaks: dict[str, Streak] = {}  # by replica id

    def refused(self, replica_id: str, task_group_id: str, index: int, refusal: Refusal) -> None:
        """Count a refused record."""
        self._counters[counter_of(refusal.reason)] += 1
        now = self._clock()
        sender = replica_id[:MOST_SHOWN]
        if sender not in self.streaks and len(self.streaks) >= MOST_SENDERS:
            sender = OTHERS
        streak = self.streaks.setdefault(sender, Streak(0, now, now, refusal))
        streak.number += 1
        streak.newest, streak.last = now, refusal
        if (untold := self._repeats.tell(refusal.reason.value)) is not None:
            log.warning(
                "record.refused",
                reason=refusal.reason.value,
                detail=refusal.detail,
                replica=sender,
                task_group=task_group_id[:MOST_SHOWN],
                index=index,
                **untold,
            )

    def taken(self, replica_id: str) -> None:
        """End the streak of a sender after a good record."""
        self.streaks.pop(replica_id[:MOST_SHOWN], None)


class RecordOutcome(enum.StrEnum):
    ACCEPTED = "accepted"  # durable, and the first for its slot
    DUPLICATE = "duplicate"  # its slot had a record, or its task group is closed
    UNKNOWN = "unknown"  # no such task group or slot
    INVALID = "invalid"  # beyond a bound, or malformed: stored as a failure
    REFUSED = "refused"  # from an unknown sender: dropped, and the slot stays open


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the sender of a record; ``refusal`` with INVALID and REFUSED."""

    outcome: RecordOutcome
    refusal: Refusal | None = None


class Ingest:
    def __init__(
        self,
        groups: Mapping[str, TaskGroup],
        was_issued: Callable[[str], bool],
        ledgers: Mapping[str, VersionLedger],
        journal: Journal,
        counters: Counter[str],
        on_resolved: Callable[[TaskGroup, Outcome], None],
        *,
        bounds: RecordBounds,
        refusals: Refusals,
        is_member: Callable[[Incarnation], bool],
    ) -> None:
        """``groups`` are the live ones; ``was_issued`` tells closed groups from unknown ones; ``is_member`` whether an
        incarnation of a replica has ever joined."""
        self._groups = groups
        self._was_issued = was_issued
        self._ledgers = ledgers
        self._bounds = bounds
        self._is_member = is_member
        self.refusals = refusals
        self._repeats = Repeats()
        self._journal = journal
        self._counters = counters
        self._on_resolved = on_resolved
        # Slots whose first record is being written, with the answers to later records, which become duplicates.
        self._pending: dict[tuple[str, int], list[Callable[[Answer], None]]] = {}
        self.failures_in_a_row = 0  # since the last trajectory
        self.last_failure = ""
        self.num_durable = 0  # records that this process made durable

    def submit(
        self,
        record: Outcome,
        answer: Callable[[Answer], None],
        sender: Incarnation | None = None,
        fault: Refusal | None = None,
    ) -> None:
        """Take a record in; calls ``answer`` once, when the outcome is certain.

        Args:
            sender: the sending replica; None is the orchestrator itself.
            fault: reason for which the record is unreadable; ``record`` then holds the known facts of its slot.
        """
        group = self._groups.get(record.task_group_id)
        slot = (record.task_group_id, record.index)
        refusal = None if sender is None else self._refusal_of(record.task_group_id, sender)
        if sender is not None and refusal is not None:
            self.refusals.refused(sender[0], *slot, refusal)
            outcome = RecordOutcome.REFUSED
        elif group is None or not group.has_slot(record.index):
            issued = group is None and self._was_issued(record.task_group_id)
            outcome = RecordOutcome.DUPLICATE if issued else RecordOutcome.UNKNOWN
        elif record.index in group.outcomes or slot in self._pending:
            outcome = RecordOutcome.DUPLICATE
        else:
            self._take(group, record, answer, sender, fault)
            return
        self._drop(record, outcome)
        if outcome is RecordOutcome.DUPLICATE and slot in self._pending:
            self._pending[slot].append(answer)
        else:
            answer(Answer(outcome, refusal))

    def _refusal_of(self, task_group_id: str, sender: Incarnation) -> Refusal | None:
        """Reason to refuse a sender's records of this task group; None for an accepted sender."""
        group = self._groups.get(task_group_id)
        if group is None and self._was_issued(task_group_id):
            return None  # closed: its record is a duplicate, from any sender
        if group is not None and all(sender) and group.was_given_to(sender):
            return None  # also before a new join after a restart
        replica_id, incarnation = sender
        named = f"replica {replica_id[:64]!r}, incarnation {incarnation[:64]!r},"
        if not all(sender) or not self._is_member(sender):
            return Refusal(reason=RefusalReason.NOT_A_MEMBER, detail=f"{named} has not joined the pool: join first")
        if group is None:
            return None
        return Refusal(reason=RefusalReason.NOT_THE_OWNER, detail=f"{named} was never given task group {task_group_id}")

    def _take(
        self,
        group: TaskGroup,
        record: Outcome,
        answer: Callable[[Answer], None],
        sender: Incarnation | None,
        fault: Refusal | None,
    ) -> None:
        """Store the record of an open slot; of one with a fault, a failure."""
        slot, replica_id = (record.task_group_id, record.index), sender[0] if sender else record.replica_id
        if fault is None and isinstance(record, Trajectory):
            try:
                self._bounds.check(record, group.order, lambda policy: self._ledgers[policy].newest_number)
            except RecordRefusedError as error:
                fault = error.refusal
        if fault is not None:
            self.refusals.refused(replica_id, *slot, fault)
            self._drop(record, RecordOutcome.INVALID)
            record = RolloutFailure(
                task_group_id=record.task_group_id,
                index=record.index,
                reason=INVALID_RECORD,
                detail=f"{fault.reason.value}: {fault.detail}",
                replica_id=record.replica_id,
            )
        elif sender is not None:
            self.refusals.taken(replica_id)
            if isinstance(record, RolloutFailure) and record.reason in (TOO_OLD, fates.VERSION_GONE, INVALID_RECORD):
                record = replace(record, reason=f"{OF_A_REPLICA}{record.reason}")
        if isinstance(record, Trajectory):
            kind = entries.TRAJECTORY
            self.failures_in_a_row = 0
            self._counters[fates.RunCount.TOKENS_RECORDED.value] += sum(s.num_trained_tokens for s in record.sequences)
        else:
            kind, record = entries.FAILURE, bounded_failure(record)
            cancelled = record.reason == TOO_OLD  # no failure
            self._counters[fates.StepFact.SLOTS_CANCELLED.value if cancelled else self.counter_of(record.reason)] += 1
            if not cancelled and record.reason != fates.VERSION_GONE:  # which tells nothing about other rollouts
                self.failures_in_a_row += 1
                self.last_failure = f"{record.reason}: {record.detail}"
        self._pending[slot] = []
        self._journal.submit(kind, entries.trajectory_key(*slot), record, self._stored, group, record, answer, fault)

    def fail(self, group: TaskGroup, index: int, reason: str, detail: str) -> None:
        """Resolve a slot that no replica will run."""
        failure = RolloutFailure(task_group_id=group.id, index=index, reason=reason, detail=detail)
        self.submit(failure, lambda answer: None)

    def _stored(
        self, group: TaskGroup, record: Outcome, answer: Callable[[Answer], None], fault: Refusal | None
    ) -> None:
        """Resolve the slot of a durable record, and answer its sender and those that repeated it meanwhile."""
        waiting = self._pending.pop((record.task_group_id, record.index))
        self.num_durable += 1
        # A cancelled task group needs no outcome.
        if group.id in self._groups and group.resolve(record):
            self._on_resolved(group, record)
        answer(Answer(RecordOutcome.ACCEPTED if fault is None else RecordOutcome.INVALID, fault))
        for repeat in waiting:
            repeat(Answer(RecordOutcome.DUPLICATE))

    def counter_of(self, reason: str) -> str:
        """The counter of a reason. Replicas send reasons: invalid names and names beyond the limit share one counter."""
        name = f"{fates.FAILURES_PREFIX}{reason.lower()}"
        known = name in self._counters or len(self._counters) < MOST_COUNTERS
        return name if known and _REASON.fullmatch(reason) else f"{fates.FAILURES_PREFIX}other"

    def _drop(self, record: Outcome, outcome: RecordOutcome) -> None:
        self._counters[f"records_{outcome.value}"] += 1
        if outcome in (RecordOutcome.INVALID, RecordOutcome.REFUSED):
            return  # ``Refusals`` logs the reason
        if (untold := self._repeats.tell(outcome.value)) is not None:
            # A duplicate is expected: of a group that was closed or cancelled, or sent again after a broken stream.
            tell = log.info if outcome is RecordOutcome.DUPLICATE else log.warning
            tell(
                LogEvent.RECORD_DROPPED,
                outcome=outcome.value,
                task_group=record.task_group_id[:64],
                index=record.index,
                replica=record.replica_id[:64],
                **untold,
            )


MASKED_WINDOW = 512  # rollouts over which the share is taken; the check begins when half of them have ended


class MaskedSamples:
    """Counts samples without a reward because of machinery, by policy and cause, and bounds their share.

    A cause that a policy can provoke would be a second try for every answer that the policy expects to be wrong, so a share
    above ``rollout.max_masked_share`` is reported to the caller, which pauses the run. The window holds the newest training
    rollouts of each policy; after a restart it is empty, and the counters continue: ``masked/<policy>/<cause>`` and
    ``redrawn/<policy>/<cause>``.
    """

    def __init__(self, counters: Counter[str], max_share: float) -> None:
        self._counters = counters
        self._max_share = max_share
        self._newest: dict[str, deque[MaskedCause | None]] = {}

    def resolved(self, policies: Iterable[str], outcome: Outcome) -> None:
        """Count the end of a training rollout of these policies."""
        if isinstance(outcome, RolloutFailure) and outcome.reason == TOO_OLD:
            return  # cancelled, not failed
        cause = cause_of(outcome.reason) if isinstance(outcome, RolloutFailure) else None
        retried = {cause_of(phase.detail) for phase in outcome.timing.phases if phase.what == PhaseKind.RETRY}
        for policy in policies:
            for again in retried:
                self._counters[MaskedCount.REDRAWN.of(policy, again)] += 1
            if cause is not None:
                self._counters[MaskedCount.MASKED.of(policy, cause)] += 1
            newest = self._newest.setdefault(policy, deque(maxlen=MASKED_WINDOW))
            newest.append(cause if cause is not None and cause.is_of_machinery else None)

    def share(self, policy: str) -> float:
        """Share of masked samples in the newest rollouts, 0 before the first."""
        newest = self._newest.get(policy, ())
        return sum(cause is not None for cause in newest) / len(newest) if newest else 0.0

    def too_many(self) -> str:
        """The policy with too large a share, the causes and the advice; empty without one. Needs half of the window."""
        for policy, newest in self._newest.items():
            share = self.share(policy)
            if 2 * len(newest) < MASKED_WINDOW or share <= self._max_share:
                continue
            causes = Counter(cause for cause in newest if cause is not None).most_common()
            told = ", ".join(f"{count} {cause.value}" for cause, count in causes)
            return (
                f"{share:.0%} of the newest {len(newest)} rollouts of {policy} have no reward ({told}), more than "
                f"rollout.max_masked_share {self._max_share:g}: {causes[0][0].advice}"
            )
        return ""

    def forget(self) -> None:
        """Empty the window: the user has seen the earlier share before resuming the run."""
        self._newest.clear()


MOST_NAME = 128  # characters
MOST_METRICS, MOST_METRIC = 256, 1e15
MOST_PHASES, MOST_PHASE_DETAIL = 1024, 1024
MOST_COUNT = 1_000_000  # of sends and retries
MOST_REASON, MOST_DETAIL = 64, 8192  # characters of a failure, which is cut
LAST_INSTANT = 253_402_300_800.0  # the year 10000, where protobuf's instants end
CLOCK_STEP_S = 86_400.0  # a clock may be set back while a rollout is played
MOST_REWARD = 1e6
LEAST_LOGPROB = -1e5  # the logits of a model, over the smallest temperature in use
MOST_LOGPROB = 1e-2  # above 0 by the rounding of an engine that computes in half precision
MOST_TEMPERATURE = 100.0
MOST_SEQUENCES = 1024  # of a trajectory; more where workflow.settings.max_sequences says so
MOST_SEGMENTS = 8192  # of a sequence
EMPTY_SEGMENTS = 16  # of them without a token
MOST_TOKENS = REQUEST_BYTES["StreamTrajectories"] // 4  # of a trajectory: four bytes each in one message
MOST_ID = np.iinfo(np.int32).max  # where no vocabulary is known
MOST_ATTEMPTS, MOST_THREADS = 1024, 1 << 20


class RecordRefusedError(Exception):
    """A value of a record is beyond its bound. ``Ingest`` catches this and reports the reason to the sender."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason=reason, detail=detail)


def refuse(reason: RefusalReason, detail: str) -> NoReturn:
    """Raises RecordRefusedError."""
    raise RecordRefusedError(reason, detail)


def shown(text: str) -> str:
    """A peer's text for a message, cut."""
    return repr(text if len(text) <= MOST_NAME else f"{text[:MOST_NAME]}...")


def check_name(text: str, what: str) -> None:
    """Raises RecordRefusedError for a name that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        refuse(RefusalReason.NAME, f"{what} is {shown(text)}: a name has 1 to {MOST_NAME} printable characters")


def check_metrics(metrics: Mapping[str, float], what: str) -> None:
    """Raises RecordRefusedError for too many metrics, or one that is not finite or too large."""
    if len(metrics) > MOST_METRICS:
        refuse(RefusalReason.METRIC, f"{what} has {len(metrics)} metrics; at most {MOST_METRICS} are taken")
    for name, value in metrics.items():
        check_name(name, "a metric")
        if not -MOST_METRIC <= value <= MOST_METRIC:  # NaN too
            refuse(RefusalReason.METRIC, f"the metric {name} of {what} is {value:g}; at most {MOST_METRIC:g} is taken")


def check_times(trajectory: Trajectory) -> None:
    """Raises RecordRefusedError for impossible times. A clock that is set back by less than a day costs no record."""
    if not _times_fit(trajectory.started_at, trajectory.finished_at):
        refuse(
            RefusalReason.TIME,
            f"the rollout began at {trajectory.started_at:g} and ended at {trajectory.finished_at:g} (seconds since 1970)",
        )
    if fault := _fault_of_timing(trajectory.timing):
        refuse(RefusalReason.TIME, fault)


def _times_fit(started_at: float, finished_at: float) -> bool:
    ordered = not started_at or not finished_at or finished_at >= started_at - CLOCK_STEP_S
    return 0 <= started_at < LAST_INSTANT and 0 <= finished_at < LAST_INSTANT and ordered  # not of NaN


def _fault_of_timing(timing: RolloutTiming) -> str:
    """The error in the actions of a rollout and their times; empty for valid ones."""
    if not (0 <= timing.accepted_at < LAST_INSTANT and 0 <= timing.sent_at < LAST_INSTANT):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBounds:
    """Known facts of one policy."""

    context_length: int
    vocab_size: int | None = None  # rows of the embedding; None: not known, and ids are bounded from below alone
    taught: bool = False  # a policy of the recipe scores its tokens
    takes_reward: Callable[[float], bool] | None = (
        None  # whether its advantage can be made from a reward; None: from any
    )
    same_rewards: bool = False  # whether the sequences of a rollout that are compared as one must have equal rewards
    group_by: GroupBy = "attempt"


class RecordBounds:
    def __init__(self, policies: Mapping[str, PolicyBounds], max_sequences: int = MOST_SEQUENCES) -> None:
        self.policies = dict(policies)
        self._max_sequences = max_sequences

    @classmethod
    def of(cls, recipe: Recipe, vocab_sizes: Mapping[str, int | None]) -> RecordBounds:
        """``vocab_sizes``: rows of each policy's embedding, as far as they are known."""
        wanted = [workflow.settings.get("max_sequences") for workflow in recipe.workflows().values()]
        return cls(
            {
                name: PolicyBounds(
                    context_length=policy.model.context_length,
                    vocab_size=vocab_sizes.get(name),
                    taught=name in recipe.teachers,
                    takes_reward=policy.algorithm.takes_reward
                    if policy.trained and policy.algorithm.reward_range
                    else None,
                    same_rewards=policy.trained
                    and policy.algorithm.advantage == "pass_at_k"
                    and policy.batch.group_by != "policy",
                    group_by=policy.batch.group_by,
                )
                for name, policy in recipe.policies.items()
            },
            max([MOST_SEQUENCES, *(number for number in wanted if isinstance(number, int))]),
        )

    def learn_vocabulary(self, policy: str, vocab_size: int) -> None:
        """Record the number of embedding rows that the trainer of a policy reports; the trainer looks the ids up."""
        if vocab_size > 0:
            self.policies[policy] = replace(self.policies[policy], vocab_size=vocab_size)

    def check(self, trajectory: Trajectory, order: TaskGroupOrder, newest: Callable[[str], int]) -> None:
        """``newest``: the newest version of a policy in the ledger.

        Raises:
            RecordRefusedError: a value of the record is beyond its bound.
        """
        _check_reward("the reward", trajectory.reward)
        if not 1 <= len(trajectory.sequences) <= self._max_sequences:
            refuse(
                RefusalReason.COUNT,
                f"the trajectory has {len(trajectory.sequences)} sequences; it must have 1 to {self._max_sequences} "
                "(workflow.settings.max_sequences raises the bound)",
            )
        num_tokens = 0
        for position, sequence in enumerate(trajectory.sequences):
            if sequence.parent is not None and not 0 <= sequence.parent < position:  # none comes from itself
                refuse(
                    RefusalReason.NUMBER,
                    f"sequence {position} has the parent {sequence.parent}; a parent comes before its children",
                )
            bounds = self.policies.get(sequence.policy)
            if bounds is None:
                refuse(RefusalReason.POLICY, f"unknown policy {shown(sequence.policy)}")
            if order.policies and sequence.policy not in order.policies:
                refuse(
                    RefusalReason.POLICY,
                    f"a sequence of {sequence.policy} in a task group of {', '.join(order.policies)}",
                )
            num_tokens += _check_sequence(sequence, bounds, order, newest(sequence.policy))
        if num_tokens > MOST_TOKENS:
            refuse(RefusalReason.LENGTH, f"the trajectory has {num_tokens} tokens; at most {MOST_TOKENS} are taken")
        if order.purpose is Purpose.TRAIN:
            self._check_compared(trajectory)
        check_metrics(trajectory.metrics, "the trajectory")
        check_times(trajectory)

    def _check_compared(self, trajectory: Trajectory) -> None:
        """Check that sequences which are compared as one have the same reward, where the advantage needs that."""
        rewards: dict[tuple[str, str, int], float] = {}
        for sequence in trajectory.sequences:
            bounds = self.policies[sequence.policy]
            if not bounds.same_rewards:
                continue
            first = rewards.setdefault(group_key(sequence, bounds.group_by), sequence.reward)
            if sequence.reward != first:
                refuse(
                    RefusalReason.REWARD,
                    f"sequences of {sequence.policy} that are compared as one have the rewards {first:g} and "
                    f"{sequence.reward:g}: advantage pass_at_k needs one of 0 or 1",
                )


def _check_reward(what: str, reward: float) -> None:
    if not -MOST_REWARD <= reward <= MOST_REWARD:  # NaN too
        refuse(RefusalReason.REWARD, f"{what} is {reward:g}; rewards are from {-MOST_REWARD:g} to {MOST_REWARD:g}")


def _check_sequence(sequence: TokenSequence, bounds: PolicyBounds, order: TaskGroupOrder, newest: int) -> int:
    """Check a sequence; returns its number of tokens."""
    trains = order.purpose is Purpose.TRAIN
    name = sequence.policy
    check_name(sequence.role, "a role")
    if not 0 <= sequence.attempt < MOST_ATTEMPTS or not 0 <= sequence.thread < MOST_THREADS:
        refuse(
            RefusalReason.NUMBER,
            f"a sequence of {name} is attempt {sequence.attempt}, thread {sequence.thread}; attempts are from 0 to "
            f"{MOST_ATTEMPTS - 1}, threads from 0 to {MOST_THREADS - 1}",
        )
    _check_reward("the reward of a sequence", sequence.reward)
    if trains and bounds.takes_reward is not None and not bounds.takes_reward(sequence.reward):
        refuse(
            RefusalReason.REWARD,
            f"the reward of a sequence of {name} is {sequence.reward:g}, from which its advantage cannot be made",
        )
    check_metrics(sequence.metrics, "a sequence")
    num_tokens = _check_lengths(sequence, bounds, order)
    _check_ids(sequence, bounds.vocab_size)
    own = [segment.logprobs for segment in sequence.segments if len(segment.logprobs)]
    _check_logprobs(own, RefusalReason.LOGPROB, f"a log-probability of {name}")
    teacher = [segment.teacher_logprobs for segment in sequence.segments if len(segment.teacher_logprobs)]
    _check_logprobs(teacher, RefusalReason.TEACHER, f"a log-probability of the teacher of {name}")
    required = order.required_versions.get(name)
    for segment in sequence.segments:
        version, temperature = segment.weight_version, segment.temperature
        if not -1 <= version <= newest:
            fault = f"is from the future: the newest is {newest}" if version > newest else "does not exist"
            refuse(RefusalReason.VERSION, f"version {version} of {name} {fault}")
        if temperature is not None and not 0 <= temperature <= MOST_TEMPERATURE:  # NaN too
            refuse(RefusalReason.TEMPERATURE, f"a segment of {name}: its temperature is {temperature}")
        if not segment.is_policy:
            continue
        if required is not None and segment.num_tokens and version != required:
            refuse(RefusalReason.VERSION, f"sampled from version {version} of {name}, not {required}")
        if trains:
            _check_trained(segment, name, bounds, order)
    return num_tokens


def _check_lengths(sequence: TokenSequence, bounds: PolicyBounds, order: TaskGroupOrder) -> int:
    """Check turns and segments; returns the total number of tokens. In training the first token belongs to the environment."""
    name, most = sequence.policy, order.sampling.max_new_tokens
    num_tokens = turn = 0
    for segment in sequence.segments:
        size = len(segment.token_ids)
        if segment.source is TokenSource.POLICY:
            if not num_tokens and size and order.purpose is Purpose.TRAIN:
                refuse(
                    RefusalReason.LENGTH,
                    f"a sequence of {name} begins with a token of the policy: the prompt is missing",
                )
            turn += size
            if turn > most:
                refuse(
                    RefusalReason.LENGTH,
                    f"a turn of {name} has {turn} tokens or more; sampling.max_new_tokens of its order is {most}",
                )
        elif size:
            turn = 0
        num_tokens += size
    if not 1 <= num_tokens <= bounds.context_length:
        refuse(
            RefusalReason.LENGTH,
            f"a sequence of {name} has {num_tokens} tokens; it must have 1 to {bounds.context_length} "
            f"(policies.{name}.model.context_length)",
        )
    if len(sequence.segments) > min(MOST_SEGMENTS, num_tokens + EMPTY_SEGMENTS):
        refuse(
            RefusalReason.COUNT,
            f"a sequence of {name} has {len(sequence.segments)} segments for {num_tokens} tokens; at most "
            f"{MOST_SEGMENTS} are taken",
        )
    return num_tokens


def _check_ids(sequence: TokenSequence, vocab_size: int | None) -> None:
    if not sequence.segments:
        return
    largest = MOST_ID if vocab_size is None else vocab_size - 1
    ids = _joined([segment.token_ids for segment in sequence.segments])
    # Negative ids are the largest of all as unsigned ones.
    if int(np.maximum.reduce(ids.view(np.uint32), initial=0)) > largest:
        wrong = int(ids[(ids < 0) | (ids > largest)][0])
        refuse(
            RefusalReason.TOKEN_ID,
            f"a sequence of {sequence.policy} has the token id {wrong}, and the policy has ids 0 to {largest}: its "
            "replica has another model or tokenizer",
        )


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _check_logprobs(arrays: list[Logprobs], reason: RefusalReason, what: str) -> None:
    if not arrays:
        return
    values = _joined(arrays)
    # The extremes of an array with NaN are NaN, and no comparison with NaN is true.
    if np.minimum.reduce(values) >= LEAST_LOGPROB and np.maximum.reduce(values) <= MOST_LOGPROB:
        return
    wrong = float(values[~((values >= LEAST_LOGPROB) & (values <= MOST_LOGPROB))][0])
    refuse(reason, f"{what} is {wrong:g}; they are from {LEAST_LOGPROB:g} to {MOST_LOGPROB:g}")


def _check_trained(segment: Segment, name: str, bounds: PolicyBounds, order: TaskGroupOrder) -> None:
    """Check that these tokens can be trained: their sampling distribution, with or without a teacher."""
    temperature = segment.temperature
    if temperature is not None and temperature < LEAST_TRAINED_TEMPERATURE:
        refuse(
            RefusalReason.TEMPERATURE,
            f"a segment of {name}: its temperature is {temperature}; training needs samples at temperature "
            f"{LEAST_TRAINED_TEMPERATURE:g} or more",
        )
    if segment.kept:
        try:
            kept_tokens.check(segment.kept, segment.token_ids, bounds.vocab_size)
        except ValueError as error:
            refuse(RefusalReason.KEPT_TOKENS, f"a segment of {name}: {error}")
    elif segment.num_tokens and order.sampling.is_truncated:
        refuse(
            RefusalReason.KEPT_TOKENS,
            f"a segment of {name}: the tokens that top_k, top_p and min_p kept are missing: the engine of its "
            "replica does not report them",
        )
    num_scored = len(segment.teacher_logprobs)
    if bounds.taught and num_scored != segment.num_tokens:
        refuse(RefusalReason.TEACHER, f"a segment of {name} lacks the log-probabilities of its teacher")
    if num_scored and not bounds.taught:
        refuse(
            RefusalReason.TEACHER,
            f"a segment of {name} has log-probabilities of a teacher, and this policy has no teacher",
        )


# --- Reports of peers: identities, versions and counts affect decisions, so that an impossible value is refused with a
# reason. The size of a message bounds what is for display.


MOST_TEXT = 1024  # characters of an address
MOST_SOURCES = 256  # of a version
MOST_SLOTS = 1 << 20
MOST_NUMBER = 1 << 53  # of a version or a step
MOST_SAMPLED = 10**15  # tokens of a process
MOST_ROWS = (1 << 31) - 1
MOST_RANKS = 1 << 16
FUTURE_S = 3600.0  # by which a peer's clock may be ahead


def check_id(what: str, text: str) -> str:
    """Raises InvalidRequestError for an id that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        raise InvalidRequestError(f"{what} is {text[:MOST_NAME]!r}: it must have 1 to {MOST_NAME} printable characters")
    return text


def check_number(what: str, value: int, least: int, most: int = MOST_NUMBER) -> int:
    """Raises InvalidRequestError for a number outside its range."""
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}; it must be {least} to {most}")
    return value


def check_held(held: Mapping[str, Held], policies: Collection[str]) -> dict[str, Held]:
    """Raises InvalidRequestError for an unknown policy, or an impossible version."""
    for policy, version in held.items():
        if policy not in policies:
            raise InvalidRequestError(
                f"held_versions names the policy {policy[:MOST_NAME]!r}; this run has {', '.join(sorted(policies))}"
            )
        check_number(f"the held version of {policy}", version.number, -1)
        if len(version.digest) > MOST_NAME:
            raise InvalidRequestError(f"the digest of {policy} has {len(version.digest)} characters")
    return dict(held)


def check_version(version: WeightVersion) -> WeightVersion:
    """Raises InvalidRequestError for an impossible number, digest or address."""
    check_number(f"the version of {version.policy[:MOST_NAME]}", version.number, 0)
    check_id("its digest", version.digest)
    if len(version.sources) > MOST_SOURCES or any(len(source) > MOST_TEXT for source in version.sources):
        raise InvalidRequestError(f"a version has {len(version.sources)} sources, or one with a very long address")
    return version


def finite_gauges(values: Mapping[str, float]) -> dict[str, float]:
    """Gauges without NaN and infinity."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def possible_intervals(found: Iterable[Interval], now: float | None = None) -> list[Interval]:
    """Those that are ordered, not before 1970 and not in the future of any clock."""
    latest = (time.time() if now is None else now) + FUTURE_S
    return [(begin, end) for begin, end in found if 0.0 <= begin <= end <= latest]

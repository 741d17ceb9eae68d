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
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import structlog

from services.common import kept_tokens
from services.common import records as fates
from services.common.config.recipe import Recipe
from services.common.kept_tokens import MaskedCause, MaskedCount, cause_of
from services.common.records import (
    LEAST_TRAINED_TEMPERATURE,
    NO_TIMING,
    TOO_OLD,
    PhaseKind,
    Purpose,
    Refusal,
    RefusalReason,
    RolloutFailure,
    Segment,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
    counter_of,
)
from services.common.security.identity import REQUEST_BYTES
from services.common.telemetry.logs import LogEvent, Repeats
from services.orchestrator.groups import GroupBy, Incarnation, Outcome, TaskGroup, group_key
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from services.orchestrator.members import MOST_NAME
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
        is_member: Callable[[Incarnation], bool],
        clock: Callable[[], float],
    ) -> None:
        """``groups`` are the live ones; ``was_issued`` tells closed groups from unknown ones; ``is_member`` whether an
        incarnation of a replica has ever joined."""
        self._groups = groups
        self._was_issued = was_issued
        self._ledgers = ledgers
        self._bounds = bounds
        self._is_member = is_member
        self._clock = clock
        self._repeats = Repeats(clock)
        self.streaks: dict[str, Streak] = {}  # refusals, by replica id
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
        closed = group is None and self._was_issued(record.task_group_id)  # its record is a duplicate, from any sender
        refusal = None
        if sender is not None and not closed:  # an owner may send before its new join after a restart
            owns = group is not None and all(sender) and (group.lacks_owner or sender in group.owners)
            refusal = None if owns else self._refusal_of(group, sender)
        if sender is not None and refusal is not None:
            outcome = RecordOutcome.REFUSED
        elif group is None or not 0 <= record.index < len(group.order.indices):
            outcome = RecordOutcome.DUPLICATE if closed else RecordOutcome.UNKNOWN
        elif record.index in group.outcomes or slot in self._pending:
            outcome = RecordOutcome.DUPLICATE
        else:
            self._take(group, record, answer, sender, fault)
            return
        self.drop(record, outcome, sender[0] if refusal is not None and sender else record.replica_id, refusal)
        if outcome is RecordOutcome.DUPLICATE and slot in self._pending:
            self._pending[slot].append(answer)
        else:
            answer(Answer(outcome, refusal))

    def _refusal_of(self, group: TaskGroup | None, sender: Incarnation) -> Refusal | None:
        """Reason to refuse the records of a sender that does not own the task group; None where there is no such group."""
        replica_id, incarnation = sender
        named = f"replica {replica_id[:64]!r}, incarnation {incarnation[:64]!r},"
        if not all(sender) or not self._is_member(sender):
            return Refusal(reason=RefusalReason.NOT_A_MEMBER, detail=f"{named} has not joined the pool: join first")
        if group is None:
            return None
        return Refusal(reason=RefusalReason.NOT_THE_OWNER, detail=f"{named} was never given task group {group.id}")

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
                newest = {policy: ledger.newest_number for policy, ledger in self._ledgers.items()}
                self._bounds.check(record, group.order, newest)
            except RecordRefusedError as error:
                fault = error.refusal
        if fault is not None:
            self.drop(record, RecordOutcome.INVALID, replica_id, fault)
            record = RolloutFailure(
                task_group_id=record.task_group_id,
                index=record.index,
                reason=INVALID_RECORD,
                detail=f"{fault.reason.value}: {fault.detail}",
                replica_id=record.replica_id,
            )
        elif sender is not None:
            self.streaks.pop(replica_id[:MOST_SHOWN], None)  # a good record ends the streak
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

    def drop(self, record: Outcome, outcome: RecordOutcome, sender: str, refusal: Refusal | None = None) -> None:
        """Count a record that is not taken, by outcome, reason and sender, and log it at intervals. Peers choose the names
        of senders, so at most ``MOST_SENDERS`` are kept."""
        kind, now, sender = outcome.value, self._clock(), sender[:MOST_SHOWN]
        self._counters[f"records_{kind}"] += 1
        # A duplicate is expected: of a group that was closed or cancelled, or sent again after a broken stream.
        event, tell = LogEvent.RECORD_DROPPED.value, log.info if outcome is RecordOutcome.DUPLICATE else log.warning
        why = {"outcome": kind}
        if refusal is not None:
            event, kind = "record.refused", refusal.reason.value
            why = {"reason": kind, "detail": refusal.detail}
            self._counters[counter_of(refusal.reason)] += 1
            if sender not in self.streaks and len(self.streaks) >= MOST_SENDERS:
                sender = OTHERS
            streak = self.streaks.setdefault(sender, Streak(0, now, now, refusal))
            streak.number, streak.newest, streak.last = streak.number + 1, now, refusal
        if (untold := self._repeats.tell(event, kind)) is not None:
            group, index = record.task_group_id[:MOST_SHOWN], record.index
            tell(event, **why, task_group=group, index=index, replica=sender, **untold)


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


MOST_METRICS, MOST_METRIC = 256, 1e15
MOST_PHASES, MOST_PHASE_DETAIL = 1024, 1024
MOST_COUNT = 1_000_000  # of sends and retries
MOST_REASON, MOST_DETAIL = 64, 8192  # characters of a failure, which is cut
LAST_INSTANT = 253_402_300_799.0  # the end of the year 9999, where protobuf's instants end
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


def within(reason: RefusalReason, what: str, value: float, least: float, most: float, more: str = "") -> None:
    """Raises RecordRefusedError for a value beyond its bound, and for NaN."""
    if not least <= value <= most:
        raise RecordRefusedError(reason, f"{what} is {value}; it must be {least} to {most}{more}")


def check_name(what: str, text: str) -> None:
    """Raises RecordRefusedError for a name that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        shown = repr(text if len(text) <= MOST_NAME else f"{text[:MOST_NAME]}...")
        raise RecordRefusedError(
            RefusalReason.NAME, f"{what} is {shown}: a name has 1 to {MOST_NAME} printable characters"
        )


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raises RecordRefusedError for too many metrics, or one that is not finite or too large."""
    within(RefusalReason.METRIC, "the number of metrics", len(metrics), 0, MOST_METRICS)
    for name, value in metrics.items():
        check_name("a metric", name)
        within(RefusalReason.METRIC, name, value, -MOST_METRIC, MOST_METRIC)


def check_times(record: Outcome) -> None:
    """Raises RecordRefusedError for impossible times of a rollout and its actions. A clock that is set back by less than a
    day costs no record."""
    timing, reason = record.timing, RefusalReason.TIME
    within(reason, "the begin of the rollout", record.started_at, 0, LAST_INSTANT)
    within(reason, "the end of the rollout", record.finished_at, 0, LAST_INSTANT)
    if record.started_at and record.finished_at:
        within(reason, "the end of the rollout", record.finished_at, record.started_at - CLOCK_STEP_S, LAST_INSTANT)
    within(reason, "the time of the order", timing.accepted_at, 0, LAST_INSTANT)
    within(reason, "the time of sending", timing.sent_at, 0, LAST_INSTANT)
    within(reason, "the number of sends", timing.num_sends, 0, MOST_COUNT)
    within(reason, "the number of retries", timing.num_retries, 0, MOST_COUNT)
    within(reason, "the number of phases", len(timing.phases), 0, MOST_PHASES)
    for phase in timing.phases:
        if not (
            0 < len(phase.what) <= MOST_NAME
            and len(phase.policy) <= MOST_NAME
            and len(phase.detail) <= MOST_PHASE_DETAIL
            and 0 <= phase.begin_s <= LAST_INSTANT
            and 0 <= phase.seconds <= LAST_INSTANT
            and phase.num_tokens >= 0
            and phase.first_version >= -1
            and phase.last_version >= -1
        ):
            what = phase.what[:MOST_NAME]
            raise RecordRefusedError(reason, f"a phase ({what!r}) has a name, time or number that cannot be")


def bounded_failure(failure: RolloutFailure) -> RolloutFailure:
    """The failure with values beyond a bound cut or dropped. Refuses no failure: a refusal would be a failure, too."""
    try:
        check_times(failure)
    except RecordRefusedError:
        failure = replace(failure, started_at=0.0, finished_at=0.0, timing=NO_TIMING)
    if len(failure.reason) <= MOST_REASON and len(failure.detail) <= MOST_DETAIL:
        return failure
    return replace(failure, reason=failure.reason[:MOST_REASON], detail=failure.detail[:MOST_DETAIL])


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

    def check(self, trajectory: Trajectory, order: TaskGroupOrder, newest: Mapping[str, int]) -> None:
        """``newest``: the newest version of each policy in the ledgers.

        Raises:
            RecordRefusedError: a value of the record is beyond its bound.
        """
        sequences = trajectory.sequences
        within(RefusalReason.REWARD, "the reward", trajectory.reward, -MOST_REWARD, MOST_REWARD)
        more = " (workflow.settings.max_sequences raises the bound)"
        within(RefusalReason.COUNT, "the number of sequences", len(sequences), 1, self._max_sequences, more)
        num_tokens = 0
        rewards: dict[tuple[str, str, int], float] = {}  # of sequences that are compared as one
        for position, sequence in enumerate(sequences):
            try:
                if sequence.parent is not None:  # it comes before its children
                    within(RefusalReason.NUMBER, "its parent", sequence.parent, 0, position - 1)
                bounds = self.policies.get(sequence.policy)
                if bounds is None:
                    raise RecordRefusedError(RefusalReason.POLICY, f"unknown policy {sequence.policy[:MOST_NAME]!r}")
                if order.policies and sequence.policy not in order.policies:
                    raise RecordRefusedError(RefusalReason.POLICY, f"its task group is of {', '.join(order.policies)}")
                num_tokens += _check_sequence(sequence, bounds, order, newest[sequence.policy])
                if bounds.same_rewards and order.purpose is Purpose.TRAIN:
                    first = rewards.setdefault(group_key(sequence, bounds.group_by), sequence.reward)
                    more = ", as that of the sequence that is compared as one: advantage pass_at_k needs one of 0 or 1"
                    within(RefusalReason.REWARD, "its reward", sequence.reward, first, first, more)
            except RecordRefusedError as error:
                name = sequence.policy[:MOST_NAME]
                raise RecordRefusedError(error.refusal.reason, f"sequence {position} of {name}: {error}") from None
        within(RefusalReason.LENGTH, "the number of tokens", num_tokens, 1, MOST_TOKENS)
        check_metrics(trajectory.metrics)
        check_times(trajectory)


def _check_sequence(sequence: TokenSequence, bounds: PolicyBounds, order: TaskGroupOrder, newest: int) -> int:
    """Check a sequence; returns its number of tokens. In training the first token belongs to the environment."""
    trains, segments = order.purpose is Purpose.TRAIN, sequence.segments
    required, most = order.required_versions.get(sequence.policy), order.sampling.max_new_tokens
    check_name("its role", sequence.role)
    within(RefusalReason.NUMBER, "its attempt", sequence.attempt, 0, MOST_ATTEMPTS - 1)
    within(RefusalReason.NUMBER, "its thread", sequence.thread, 0, MOST_THREADS - 1)
    within(RefusalReason.REWARD, "its reward", sequence.reward, -MOST_REWARD, MOST_REWARD)
    if trains and bounds.takes_reward is not None and not bounds.takes_reward(sequence.reward):
        detail = f"its reward is {sequence.reward:g}, from which its advantage cannot be made"
        raise RecordRefusedError(RefusalReason.REWARD, detail)
    check_metrics(sequence.metrics)
    num_tokens = turn = 0
    for segment in segments:
        size, version = len(segment.token_ids), segment.weight_version
        within(RefusalReason.VERSION, "the version of a segment", version, -1, newest, ", the newest")
        if segment.temperature is not None:
            least = LEAST_TRAINED_TEMPERATURE if trains and segment.is_policy else 0.0
            within(
                RefusalReason.TEMPERATURE, "a segment: its temperature", segment.temperature, least, MOST_TEMPERATURE
            )
        if segment.is_policy:
            if trains and size and not num_tokens:
                raise RecordRefusedError(RefusalReason.LENGTH, "it begins with a token of the policy: no prompt")
            turn += size
            within(RefusalReason.LENGTH, "the length of a turn", turn, 0, most, " (sampling.max_new_tokens)")
            if required is not None and size:
                within(RefusalReason.VERSION, "the version of a segment", version, required, required, ", as ordered")
            if trains:
                _check_trained(segment, bounds, order)
        elif size:
            turn = 0
        num_tokens += size
    more = f" (policies.{sequence.policy}.model.context_length)"
    within(RefusalReason.LENGTH, "its number of tokens", num_tokens, 1, bounds.context_length, more)
    most_segments = min(MOST_SEGMENTS, num_tokens + EMPTY_SEGMENTS)
    within(RefusalReason.COUNT, "its number of segments", len(segments), 0, most_segments)
    ids = np.concatenate([segment.token_ids for segment in segments])
    largest = MOST_ID if bounds.vocab_size is None else bounds.vocab_size - 1
    if int(ids.view(np.uint32).max()) > largest:  # negative ids are the largest of all as unsigned ones
        wrong = int(ids[(ids < 0) | (ids > largest)][0])
        detail = f"it has the token id {wrong}, and the policy has ids 0 to {largest}: its replica has another model"
        raise RecordRefusedError(RefusalReason.TOKEN_ID, f"{detail} or tokenizer")
    for reason, what, arrays in (
        (RefusalReason.LOGPROB, "a log-probability", [s.logprobs for s in segments]),
        (RefusalReason.TEACHER, "a log-probability of the teacher", [s.teacher_logprobs for s in segments]),
    ):
        values = np.concatenate(arrays)
        if len(values):  # the extremes of an array with NaN are NaN
            within(reason, what, float(values.min()), LEAST_LOGPROB, MOST_LOGPROB)
            within(reason, what, float(values.max()), LEAST_LOGPROB, MOST_LOGPROB)
    return num_tokens


def _check_trained(segment: Segment, bounds: PolicyBounds, order: TaskGroupOrder) -> None:
    """Check that these tokens can be trained: their sampling distribution, with or without a teacher."""
    num_tokens, num_scored = len(segment.token_ids), len(segment.teacher_logprobs)
    if segment.kept:
        try:
            kept_tokens.check(segment.kept, segment.token_ids, bounds.vocab_size)
        except ValueError as error:
            raise RecordRefusedError(RefusalReason.KEPT_TOKENS, f"a segment: {error}") from None
    elif num_tokens and order.sampling.is_truncated:
        raise RecordRefusedError(
            RefusalReason.KEPT_TOKENS,
            "a segment: the tokens that top_k, top_p and min_p kept are missing: the engine of its replica does not report "
            "them",
        )
    scored = num_tokens if bounds.taught else 0
    what = "the number of log-probabilities of the teacher of a segment"
    within(RefusalReason.TEACHER, what, num_scored, scored, scored)

"""The fates of trajectories and sequences, as the orchestrator writes them to the journal and tools read them.

slot -> failed, cancelled, or a trajectory
advantage group complete -> GroupFate: kept, or dropped and why
kept sequence -> in a batch record: trained, cut (some tokens masked) or masked (all) | left the buffer: expired
task group -> ClosedReason: no more sequences of the group are trained
"""

from __future__ import annotations

import enum

TOO_OLD = "TOO_OLD"
"""The reason in the failure of a slot that was cancelled because its result could only have been dropped as too old."""

VERSION_GONE = "VERSION_UNAVAILABLE"
"""The reason in the failure of a slot of a requested evaluation whose weight version no replica holds any more."""

FAILURES_PREFIX = "failures_"
"""Counters of failed rollouts: the prefix and the reason in small letters."""


class GroupFate(enum.StrEnum):
    """The fate of an advantage group when its task group was complete."""

    KEPT = "kept"  # it waits for a batch; members that were too old already may be missing
    EQUAL_REWARDS = "equal_rewards"
    RESAMPLED_AWAY = "resampled_away"
    TRUNCATED = "truncated"  # every member was cut by its budget, and such are masked (rollout.on_truncation)
    SURPLUS = "surplus"  # its policy cannot use it any more
    EXPIRED = "expired"  # every member was too old


class ClosedReason(enum.StrEnum):
    """Why a task group is closed."""

    NOTHING_TO_TRAIN = "nothing to train"  # no advantage group was kept
    TRAINED = "trained"  # the last of it went into a batch
    EXPIRED = "expired"  # the last of it became too old in the buffer
    STEPS_DONE = "all training steps are done"  # it was cancelled: the last batch was put together without it
    RUN_ENDED = "the run has ended"  # it was cancelled
    VERSION_GONE = "no replica holds the version to evaluate any more"  # it was cancelled
    SET_ASIDE = "set aside"  # records of it cannot be used: nothing of it is trained any more, nor waited for


class SetAsideReason(enum.StrEnum):
    """Why a record of the journal is not used."""

    DAMAGED = "damaged"  # its bytes are damaged or missing
    UNREADABLE = "unreadable"  # its bytes are intact, and no valid record of its kind
    REFUSED = "refused"  # it can be read, and cannot be applied or trained: a reward or a token id beyond all bounds
    ORPHANED = "orphaned"  # the record of its task group is lost


class StepFact(enum.StrEnum):
    """Counts in the statistics of a batch record.

    ``*_EXPIRED`` and ``SLOTS_CANCELLED`` count events since the batch before, the others this batch's fresh
    sequences.
    """

    SEQUENCES_EXPIRED = "sequences_expired"  # finished, and nothing of them may be trained any more
    TOKENS_EXPIRED = "tokens_expired"  # that the policy wrote in them
    SLOTS_CANCELLED = "slots_cancelled"  # stopped at their replica as too old: failures with the reason TOO_OLD
    SEQUENCES_MASKED = "sequences_masked"  # their oldest tokens are masked; those of which all would be are expired
    TOKENS_MASKED = "tokens_masked"
    LATE_WAIT_S = "late_wait_s"  # that the batch waited for groups that were due, in seconds
    # Of rollouts and rewards since the batch before:
    TIMEOUTS = "timeouts"  # rollouts in which the policy was too slow; among the failures
    TRUNCATED_MASKED = "sequences_truncated_masked"  # compared and not trained (rollout.on_truncation)
    REWARDS_CLIPPED = "rewards_clipped"  # that reward_clip changed, of complete groups


class RunCount(enum.StrEnum):
    """Counters of a run by fixed names: in its progress, the states of its journal, its metrics and ``summary.json``.

    Counters with a part that varies have their own prefix: ``FAILURES_PREFIX``, ``refusals.counter_of``,
    ``masked.MaskedCount``. Some members of ``StepFact`` are counters, too.
    """

    TASK_GROUPS_ISSUED = "task_groups_issued"
    TASK_GROUPS_CANCELLED = "task_groups_cancelled"
    TASK_GROUPS_OVERDUE = "task_groups_overdue"
    SLOTS_REISSUED = "slots_reissued"  # their replica was lost
    TOKENS_SAMPLED = "tokens_sampled"  # as replicas report them
    TOKENS_RECORDED = "tokens_recorded"  # in trajectories
    SEQUENCES_KEPT = "sequences_kept"  # for training, by dynamic sampling and resampling
    SEQUENCES_EQUAL_REWARDS = "sequences_filtered_equal_rewards"
    SEQUENCES_RESAMPLED_AWAY = "sequences_resampled_away"
    SEQUENCES_SURPLUS = "sequences_surplus"
    SEQUENCES_REPLAYED = "sequences_replayed"
    SEQUENCES_LOST = "sequences_lost"  # of recorded batches
    SEQUENCES_SET_ASIDE = "sequences_set_aside"  # possibly members of a batch with a lost record
    REPLICA_LEASES_LOST = "replica_leases_lost"
    TRAINER_LEASES_LOST = "trainer_leases_lost"
    STALLS = "stalls"
    PAUSES_FOR_FAILURES = "pauses_for_failures"  # that a person ends: without a terminal, the launcher ends the run
    WRONG_DIGEST_HELD = "wrong_digest_held"

"""Causes of rollouts without a reward that the policy has not caused, as replicas report and the run counts them.

Such a sample is left out of training (masked), or repeated and counted as redrawn. Names only, and the parsing of a
failure's reason.
"""

from __future__ import annotations

import enum

from services.common import errors


class MaskedCount(enum.StrEnum):
    """Counters of samples, by policy and cause: the orchestrator counts them, ``rollmill watch`` shows them."""

    MASKED = "masked"  # left out of training
    REDRAWN = "redrawn"  # repeated

    def of(self, policy: str, cause: MaskedCause) -> str:
        """
        >>> MaskedCount.MASKED.of("model0", MaskedCause.CAPACITY)
        'masked/model0/capacity'
        """
        return f"{self}/{policy}/{cause}"


class MaskedCause(enum.StrEnum):
    """The failed part. ``advice`` says where to look."""

    GRADER_FAILED = "grader_failed"  # a reward or judgement that says nothing about the answer
    EPISODE_LOST = "episode_lost"  # the environment, a live process or the tools of a trajectory
    CAPACITY = "capacity"  # the gateway or an engine was full for longer than the longest wait
    DEADLINE = "deadline"  # a named wait ran out
    INFRASTRUCTURE = "infrastructure"  # a peer, a process or the machine
    REPLICA_LOST = "replica_lost"  # too many replicas were lost while they played it
    INVALID_RECORD = "invalid_record"  # the record was refused
    ROLLOUT_TIMEOUT = (
        "rollout_timeout"  # the policy was too slow; with rollout.on_timeout it may be scored all the same
    )
    OTHER = "other"  # an exception in a workflow, tool or reward of the user

    @property
    def is_of_machinery(self) -> bool:
        """Whether the reason counts for ``rollout.max_masked_share``: masking by a rule of the recipe does not."""
        return self is not MaskedCause.ROLLOUT_TIMEOUT

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    MaskedCause.GRADER_FAILED: "read the gateway's log about the grader and the failing rows",
    MaskedCause.EPISODE_LOST: "read the gateway's log about its environments and live processes",
    MaskedCause.CAPACITY: "raise envgateway.sandbox.num_slots or add workers, or play fewer rollouts at once",
    MaskedCause.DEADLINE: "see which wait the failures name; raise rollout.timeout_s where it is the rollout's",
    MaskedCause.INFRASTRUCTURE: "see which peer the failures name, and its log",
    MaskedCause.REPLICA_LOST: "see why replicas die: memory, their logs",
    MaskedCause.INVALID_RECORD: "see which rule the records break; replicas of another release send such",
    MaskedCause.ROLLOUT_TIMEOUT: "raise rollout.timeout_s, or lower the token budgets",
    MaskedCause.OTHER: "read the failures of the workflow, the tools and the reward",
}
REPLICAS_LOST, INVALID_RECORD = "REPLICAS_LOST", "INVALID_RECORD"
_CAUSES = {
    errors.GraderFailedError.reason: MaskedCause.GRADER_FAILED,
    errors.EpisodeNotFoundError.reason: MaskedCause.EPISODE_LOST,
    errors.CapacityError.reason: MaskedCause.CAPACITY,
    errors.DeadlineError.reason: MaskedCause.DEADLINE,
    errors.InfrastructureError.reason: MaskedCause.INFRASTRUCTURE,
    errors.RolloutTimeoutError.reason: MaskedCause.ROLLOUT_TIMEOUT,
    REPLICAS_LOST: MaskedCause.REPLICA_LOST,
    INVALID_RECORD: MaskedCause.INVALID_RECORD,
}


def cause_of(reason: str) -> MaskedCause:
    """Of a failure's reason, which is a replica's word and may be anything.

    >>> cause_of("GRADER_FAILED"), cause_of("ValueError")
    (<MaskedCause.GRADER_FAILED: 'grader_failed'>, <MaskedCause.OTHER: 'other'>)
    """
    return _CAUSES.get(reason, MaskedCause.OTHER)

"""Reasons for refusing a record, which the orchestrator sends and replicas read.

docs/protocol.md has the bound behind each. The wire has ``RefusalReason`` (protos/rollmill/v1/pool.proto).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RefusalReason(enum.StrEnum):
    """Short and countable: the counter of each is ``refused_<value>``."""

    NOT_A_MEMBER = "not_a_member"  # the sender never joined the pool as this incarnation
    NOT_THE_OWNER = "not_the_owner"  # the sender was never given this task group
    UNREADABLE = "unreadable"  # it cannot be read as a record
    POLICY = "policy"  # one that the run, or the task group, does not have
    VERSION = "version"  # one that does not exist, or is not the one asked for
    TOKEN_ID = "token_id"  # outside the policy's vocabulary
    LENGTH = "length"  # too many tokens in a turn, a sequence or a trajectory, or none where there must be one
    COUNT = "count"  # too many sequences or segments, or no sequence
    REWARD = "reward"  # not finite, too large, or none that the policy's advantage can be made from
    LOGPROB = "logprob"  # one that no distribution gives
    TEACHER = "teacher"  # a teacher's log-probability that no distribution gives, is missing, or was not asked for
    KEPT_TOKENS = "kept_tokens"  # unreadable, missing, or outside the vocabulary
    TEMPERATURE = "temperature"  # one at which nothing can be sampled
    NAME = "name"  # empty, too long or not printable
    NUMBER = "number"  # an attempt or a thread below 0 or far too large
    METRIC = "metric"  # too many, not finite, or too large
    TIME = "time"  # impossible times or phases of the rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason with its value, for people."""

    reason: RefusalReason
    detail: str


COUNTER = "refused_"  # of a reason, in the counters of the run


def counter_of(reason: RefusalReason) -> str:
    """
    >>> counter_of(RefusalReason.TOKEN_ID)
    'refused_token_id'
    """
    return COUNTER + reason.value

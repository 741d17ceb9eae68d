"""The exception tree, named after the boundary that broke.

    RollmillError
    ├── UserError                 the caller's or the recipe's mistake: fix it, do not retry
    │   ├── InvalidRequestError       INVALID_REQUEST
    │   ├── ConfigError               INVALID_CONFIG
    │   ├── DatasetError              INVALID_DATASET
    │   ├── PromptTooLongError        PROMPT_TOO_LONG
    │   ├── UnknownPolicyError        UNKNOWN_POLICY
    │   ├── ModelMismatchError        MODEL_MISMATCH
    │   └── AccessError               keys are missing, wrong or not for this; waiting does not help
    │       ├── UnauthenticatedError      UNAUTHENTICATED: the caller or the server is unknown
    │       └── PermissionDeniedError     PERMISSION_DENIED: known, but not allowed to do this
    ├── NotFoundError             EPISODE_NOT_FOUND, UNKNOWN_ENVIRONMENT, ... see ``reason``
    │   ├── EpisodeNotFoundError      EPISODE_NOT_FOUND
    │   └── UnknownEnvironmentError   UNKNOWN_ENVIRONMENT
    ├── StateError                right request, wrong moment: follow the message
    │   ├── LeaseLostError            LEASE_LOST
    │   ├── WeightsStaleError         WEIGHTS_STALE
    │   ├── VersionConflictError      VERSION_CONFLICT
    │   ├── VersionUnavailableError   VERSION_UNAVAILABLE
    │   └── SandboxRefusedError       SANDBOX_REFUSED
    ├── OffsetOutOfRangeError     OFFSET_OUT_OF_RANGE
    ├── SupersededError           SUPERSEDED: newer work replaced this
    ├── CapacityError             CAPACITY_EXHAUSTED: wait ``retry_after_s``, or choose another replica
    ├── CorruptDataError          DIGEST_MISMATCH: a checksum does not match, fetch again in full
    │   └── BatchLostError            BATCH_LOST: a recorded batch is damaged in the journal; another request does not help
    ├── DeadlineError             DEADLINE_EXCEEDED: a named wait ran out
    ├── RolloutTimeoutError       ROLLOUT_TIMEOUT: the policy was slower than rollout.timeout_s; a setting gives the cost
    └── InfrastructureError       INFRASTRUCTURE: a peer or machine failed; retryable, never a reward
        └── GraderFailedError         GRADER_FAILED: a reward or judgement has no information about the answer

Each leaf's ``reason`` is a name of ``ErrorReason`` in ``protos/rollmill/v1/errors.proto``; a contract test
compares the two lists. ``services.common.rpc.client`` turns these into gRPC statuses and back, from one table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeVar


class RollmillError(Exception):
    """Base of all. ``metadata`` travels with the error over gRPC; values are strings."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata


class UserError(RollmillError):
    """The request or the recipe is wrong and always will be."""

    reason = "INVALID_REQUEST"


class InvalidRequestError(UserError):
    reason = "INVALID_REQUEST"


class ConfigError(UserError):
    """A recipe that cannot run; the message has the path in the recipe and the correction."""

    reason = "INVALID_CONFIG"


class DatasetError(UserError):
    """A dataset file or row that cannot be read; the message has file and row number."""

    reason = "INVALID_DATASET"


class PromptTooLongError(UserError):
    reason = "PROMPT_TOO_LONG"


class UnknownPolicyError(UserError):
    reason = "UNKNOWN_POLICY"


class ModelMismatchError(UserError):
    """Checkpoint, tokenizer or peer belongs to another model."""

    reason = "MODEL_MISMATCH"


class AccessError(UserError):
    """Keys are missing, wrong, or not for this. Never holds a secret, so its message may be logged."""

    reason = "UNAUTHENTICATED"


class UnauthenticatedError(AccessError):
    """The caller, or the one called, shows no certificate or token of this run that is valid now."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(AccessError):
    """The caller's role may not do this."""

    reason = "PERMISSION_DENIED"


class NotFoundError(RollmillError):
    reason = "NOT_FOUND"


class EpisodeNotFoundError(NotFoundError):
    reason = "EPISODE_NOT_FOUND"


class UnknownEnvironmentError(NotFoundError):
    reason = "UNKNOWN_ENVIRONMENT"


class StateError(RollmillError):
    reason = "WRONG_STATE"


class LeaseLostError(StateError):
    reason = "LEASE_LOST"


class WeightsStaleError(StateError):
    reason = "WEIGHTS_STALE"


class VersionConflictError(StateError):
    """Another digest for a number that the ledger already knows."""

    reason = "VERSION_CONFLICT"


class VersionUnavailableError(StateError):
    reason = "VERSION_UNAVAILABLE"


class SandboxRefusedError(StateError):
    """No isolation tier that the config allows works here; the message names the line to add."""

    reason = "SANDBOX_REFUSED"


class OffsetOutOfRangeError(RollmillError):
    reason = "OFFSET_OUT_OF_RANGE"


class SupersededError(RollmillError):
    reason = "SUPERSEDED"


class CapacityError(RollmillError):
    reason = "CAPACITY_EXHAUSTED"


class CorruptDataError(RollmillError):
    reason = "DIGEST_MISMATCH"


class BatchLostError(CorruptDataError):
    """The record of a batch, or all its trajectories, cannot be used any more."""

    reason = "BATCH_LOST"


class DeadlineError(RollmillError):
    """A named wait ran out; the message has the name of the wait, its duration and the awaited component."""

    reason = "DEADLINE_EXCEEDED"


class RolloutTimeoutError(RollmillError):
    """The policy took longer than ``rollout.timeout_s``: no machinery had failed or was waited for."""

    reason = "ROLLOUT_TIMEOUT"


class InfrastructureError(RollmillError):
    """A peer, a process or the machine failed. Retryable; never turned into a reward."""

    reason = "INFRASTRUCTURE"


class GraderFailedError(InfrastructureError):
    """A reward or judgement ended without a word about the answer."""

    reason = "GRADER_FAILED"


# --- Derives every seed of a run from ``run.seed``.


def derived_seed(seed: int, *parts: str | int) -> int:
    """Derive a seed of 62 bits (an int64 has room to count up) for one part of the scope of ``seed``.

    >>> derived_seed(1, "train", 0) == derived_seed(1, "train", 0), derived_seed(1, "train", 0) == derived_seed(1, "train", 1)
    (True, False)
    """
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def slot_seed(group_seed: int, index: int) -> int:
    """The sampling seed of slot ``index`` of a task group."""
    return derived_seed(group_seed, "slot", index)


# --- Divides a sequence into parts of a bounded size.


T = TypeVar("T")


def in_buckets(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Neighbours in lists of at most ``most`` together; a larger item has a list of its own. No list is empty.

    >>> list(in_buckets([1, 2, 9, 1, 1], lambda size: size, 3))
    [[1, 2], [9], [1, 1]]
    """
    bucket: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if bucket and held + size > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket

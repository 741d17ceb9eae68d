"""The records that go round the ring: segments, sequences, trajectories, task groups.

Plain frozen dataclasses over numpy arrays. Independent of gRPC, protobuf and torch;
``services.common.wire`` converts to and from the wire.

Wrong-length lists cannot be written down: a segment is a run of consecutive tokens with *one* source and
*one* weight version, so the loss mask is ``segment.source is TokenSource.POLICY`` alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from services.common import kept_tokens

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Part = TypeVar("Part")
Text = TypeVar("Text")
Interval = tuple[float, float]  # begin and end, in seconds since the epoch
EMPTY_LOGPROBS: Logprobs = np.zeros(0, dtype=np.float32)


class TokenSource(enum.StrEnum):
    """The author of a run of tokens. Only policy tokens are trained."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


class StopReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # the policy ended its turn and the workflow was done
    LENGTH = "length"  # the token budget or the context ran out
    TURN_LIMIT = "turn_limit"  # the workflow's last allowed turn was used
    ENVIRONMENT = "environment"  # the environment said the episode is over
    ABORTED = "aborted"  # cancelled from outside


class Purpose(enum.StrEnum):
    """The purpose of a task group."""

    TRAIN = "train"
    EVALUATION = "evaluation"


PlayedBy = Purpose | tuple[Purpose, str]  # key of what plays a task group: by purpose, or by its dataset too


def part_for(parts: Mapping[PlayedBy, Part], purpose: Purpose, source: str) -> Part:
    """The part of a dataset, else that of the purpose."""
    found = parts.get((purpose, source))
    return parts[purpose] if found is None else found


def by_name(record: Any) -> dict[str, Any]:
    """The fields of a record with slots. `asdict` copies every nested value, which takes ten times as long."""
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens with one source and, for the policy, one weight version.

    >>> Segment.environment([1, 2]).num_tokens
    2
    """

    source: TokenSource
    token_ids: TokenIds  # [num_tokens] int32
    logprobs: Logprobs = field(default_factory=lambda: EMPTY_LOGPROBS)  # [num_tokens] float32 for the policy, [0] else
    weight_version: int = -1  # the version that computed these tokens; -1 for the environment
    mixed_cache: bool = False  # sampled on a KV cache that older weights had computed in part
    kept: bytes = b""  # which tokens could be drawn for each (``kept_tokens``); empty: the whole vocabulary
    temperature: float | None = None  # that they were drawn at; None: the temperature of the recipe's ``sampling``
    # [num_tokens] float32 by the teacher of the policy (``algorithm.distillation.teacher``); [0] where none was asked
    teacher_logprobs: Logprobs = field(default_factory=lambda: EMPTY_LOGPROBS)

    def __post_init__(self) -> None:
        if self.source is TokenSource.POLICY:
            if len(self.logprobs) != len(self.token_ids):
                raise ValueError(
                    f"policy segment has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probabilities"
                )
            if self.weight_version < 0:
                raise ValueError(f"policy segment has weight version {self.weight_version}; it must be 0 or more")
            if len(self.teacher_logprobs) not in (0, len(self.token_ids)):
                raise ValueError(
                    f"policy segment has {len(self.token_ids)} tokens but {len(self.teacher_logprobs)} log-probabilities "
                    "of a teacher"
                )
        elif len(self.logprobs) or self.kept or len(self.teacher_logprobs):
            raise ValueError("an environment segment carries neither log-probabilities nor kept tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_policy(self) -> bool:
        return self.source is TokenSource.POLICY

    @classmethod
    def environment(cls, token_ids: Seq[int] | TokenIds) -> Segment:
        """Tokens that the policy read but did not write: prompt, tool results, observations."""
        return cls(source=TokenSource.ENVIRONMENT, token_ids=np.asarray(token_ids, dtype=np.int32))

    @classmethod
    def policy(
        cls,
        token_ids: Seq[int] | TokenIds,
        logprobs: Seq[float] | Logprobs,
        weight_version: int,
        mixed_cache: bool = False,
        kept: bytes = b"",
    ) -> Segment:
        """Tokens that the policy sampled, with their behaviour log-probabilities."""
        return cls(
            source=TokenSource.POLICY,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            weight_version=weight_version,
            mixed_cache=mixed_cache,
            kept=kept,
        )

    def head(self, num_tokens: int) -> Segment:
        """The first ``num_tokens`` tokens, with all that belongs to them."""
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            kept=kept_tokens.head(self.kept, self.token_ids, num_tokens),
            teacher_logprobs=self.teacher_logprobs[:num_tokens],
        )


class Origin(enum.StrEnum):
    """How a conversation of an agent came from another of the same rollout, its parent."""

    ROOT = "root"  # from none
    BRANCH = "branch"  # goes on from an earlier answer of the parent: parallel calls, a history that was cut at its end
    COMPACTION = "compaction"  # a prompt in place of the parent's history, of which it quotes an answer
    SUBAGENT = "subagent"  # begun while the parent waited for a tool, or from an answer of the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """The tokens of one policy in one role and attempt, with the tokens read in between."""

    policy: str
    segments: tuple[Segment, ...]
    reward: float
    stop_reason: StopReason
    role: str = "agent"
    attempt: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # e.g. {"tool_calls": 2.0}
    thread: int = 0  # of the conversations that an agent had at once in this role and attempt
    parent: int | None = None  # position in the trajectory of the sequence that it came from
    origin: Origin = Origin.ROOT

    @property
    def num_tokens(self) -> int:
        return sum([len(s.token_ids) for s in self.segments])

    @property
    def num_trained_tokens(self) -> int:
        return sum([len(s.token_ids) for s in self.segments if s.source is TokenSource.POLICY])

    @property
    def min_version(self) -> int | None:
        """Oldest weight version among the trained tokens; None when there is none."""
        versions = [s.weight_version for s in self.segments if s.is_policy and s.num_tokens]
        return min(versions) if versions else None

    @property
    def max_version(self) -> int | None:
        """Newest weight version among the trained tokens; None when there is none."""
        return max((s.weight_version for s in self.segments if s.is_policy and s.num_tokens), default=None)

    @property
    def token_ids(self) -> TokenIds:  # [num_tokens]
        return np.concatenate([s.token_ids for s in self.segments]) if self.segments else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPhase:
    """One action or wait of a rollout.

    >>> RolloutPhase(what="generate", begin_s=0.5, seconds=1.0, policy="model0", num_tokens=64).end_s
    1.5
    """

    what: str  # generate, score, create_episode, step, close_episode, execute_code, compute_reward, judge, retry
    begin_s: float  # from the rollout's start
    seconds: float
    policy: str = ""  # that generated
    num_tokens: int = 0
    first_version: int = -1  # oldest and newest that computed one of these tokens
    last_version: int = -1
    detail: str = ""  # its result, in a few words

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTiming:
    """When a rollout was where, in seconds since the epoch on the replica's clock; 0 is unknown. For people."""

    accepted_at: float = 0.0  # the order came; before the start by what it waited for a free slot
    sent_at: float = 0.0  # the record was written to the stream, for the last time
    num_sends: int = 0
    num_retries: int = 0  # played again after an infrastructure failure
    phases: tuple[RolloutPhase, ...] = ()  # in order of beginning


NO_TIMING = RolloutTiming()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout: slot ``index`` of a task group."""

    task_group_id: str
    index: int
    sequences: tuple[TokenSequence, ...]
    reward: float  # the workflow's outcome, which evaluation averages
    metrics: Mapping[str, float] = field(default_factory=dict)
    started_at: float = 0.0  # seconds since the epoch, on the replica's clock
    finished_at: float = 0.0
    replica_id: str = ""
    timing: RolloutTiming = NO_TIMING


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """Slot ``index`` ended without a trajectory: no reward, and its siblings go on."""

    task_group_id: str
    index: int
    reason: str  # short and countable, e.g. "PromptTooLong", "InfrastructureError"
    detail: str = ""
    replica_id: str = ""
    started_at: float = 0.0  # seconds since the epoch, on the replica's clock; 0 when it never began
    finished_at: float = 0.0
    timing: RolloutTiming = NO_TIMING


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. ``data`` is the dataset row, opaque to everything but workflow and reward."""

    task_id: str
    data: Mapping[str, Any]


LEAST_TRAINED_TEMPERATURE = 1e-6  # below it the distribution that tokens are drawn from is that of greedy ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``temperature == 0`` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    max_new_tokens: int = 1024
    min_new_tokens: int = 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroupOrder:
    """An order to a replica: play these slots of this task group."""

    task_group_id: str
    task: Task
    indices: tuple[int, ...]  # the unresolved slots only
    purpose: Purpose
    sampling: Sampling
    required_versions: Mapping[str, int] = field(default_factory=dict)  # evaluation: serve on exactly these
    policies: tuple[str, ...] = ()  # that the rollouts may use; empty means all
    seed: int = 0
    timeout_s: float = 600.0
    source: str = (
        ""  # name of its source of training, or of its dataset of evaluation; empty for the only one of training
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """An immutable, verified set of weights: (run, policy, number) with its digest."""

    policy: str
    number: int
    digest: str  # "xxh3-128:<hex>" over the per-tensor digests
    sources: tuple[str, ...] = ()  # addresses of WeightServices that can serve it


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """How replicas share the fetching of one payload: relay i brings shard i of as many equal shards."""

    relays: tuple[str, ...]  # addresses of WeightServices
    own_shard: int | None = None  # of the receiving replica; None when it is no relay

    def __post_init__(self) -> None:
        if self.own_shard is not None and not 0 <= self.own_shard < len(self.relays):
            raise ValueError(f"a fetch plan of {len(self.relays)} relays names shard {self.own_shard}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """One version that a replica took, or tried to take, stage by stage. Times in seconds."""

    policy: str
    version: int
    base_version: int | None = None  # the replaced version; None when none was held
    encoding: str = ""  # a value of weights.manifest.Encoding; empty when it failed before that was known
    transport: str = ""  # "mapped", "bulk" or "grpc"
    sources: tuple[str, ...] = ()  # most bytes first
    payload_size_bytes: int = 0
    full_size_bytes: int = 0
    num_changes: int = 0  # elements
    started_at: float = 0.0  # since the epoch
    encode_s: float = 0.0  # at the source
    fetch_s: float = 0.0
    verify_s: float = 0.0
    write_s: float = 0.0
    pause_s: float = 0.0  # that decoding stood still
    error: str = ""  # why it failed

    @property
    def bits_per_change(self) -> float:
        """Of a delta; 0 without changes."""
        return 8 * self.payload_size_bytes / self.num_changes if self.num_changes else 0.0


TRANSFER_STAGES = ("encode_s", "fetch_s", "verify_s", "write_s", "pause_s")  # fields of ``WeightTransfer``, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One sequence of a batch, with the statistics of its whole advantage group stamped on it.

    They are of the rewards that are trained, after all shaping, as ``sequence.reward`` is.
    """

    sequence_id: str  # "<task group>/<index>/<position in the trajectory>"
    sequence: TokenSequence
    group_mean: float
    group_std: float  # sample standard deviation (N - 1); 1 for a singleton
    group_size: int  # rewards in the statistics: one per rollout or per sequence, also of those that are not trained
    staleness: int  # versions, at batch assembly
    minibatch: int
    position: int  # order inside the minibatch, the same for any number of ranks
    advantage_scale: float = 1.0  # of its source of tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchTotals:
    """Global totals of one minibatch, over all ranks: the denominators of the loss."""

    num_sequences: int
    num_trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's share of the batch of one training step."""

    policy: str
    training_step: int  # starts from version training_step - 1, publishes version training_step
    minibatches: tuple[MinibatchTotals, ...]
    sequences: tuple[TrainingSequence, ...]  # of this rank, ordered by (minibatch, position)


# --- A turn on a device whose memory rollouts and training share.


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """Command of the orchestrator to a replica or a trainer; a later command replaces earlier ones.

    ``yours``: hold the device's memory and compute. Otherwise free the memory, and keep running work for the next own turn.
    The receiver reports ``number`` after that.
    """

    number: int
    yours: bool


NO_TURN = DeviceTurn(number=0, yours=False)


# --- The fates of trajectories and sequences, as the orchestrator writes them to the journal and tools read them.


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


class PhaseKind(enum.StrEnum):
    GENERATE = "generate"  # a policy's turn
    SCORE = "score"  # a teacher scores the generated tokens
    CREATE_EPISODE = "create_episode"
    STEP = "step"  # of an episode
    CLOSE_EPISODE = "close_episode"
    EXECUTE_CODE = "execute_code"
    COMPUTE_REWARD = "compute_reward"
    JUDGE = "judge"
    RETRY = "retry"  # the pause before another attempt; the detail is the reason of the failure
    NOT_RECORDED = "not_recorded"  # counts the phases beyond the bound


# --- Reasons for refusing a record, which the orchestrator sends and replicas read.


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


def encodable(value: Text) -> Text:
    """The value with a question mark for each lone surrogate of its texts, which a policy, a program or a tool may write.

    >>> encodable("a\\ud800"), encodable({"b": ["\\udfff"]})
    ('a?', {'b': ['?']})
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(map(encodable, value))  # type: ignore[return-value]
    if isinstance(value, dict):
        return {encodable(key): encodable(part) for key, part in value.items()}  # type: ignore[return-value]
    return value

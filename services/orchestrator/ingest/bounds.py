"""Bounds of every value in a rollout's record, from the policies, the sampling and the recipe.

    token ids      the rows of the policy's embedding (its config.json; its trainer when it joins)
    lengths        sampling.max_new_tokens of the order, policies.<name>.model.context_length, the largest message
    counts         workflow.settings.max_sequences, and constants that lie far above the counts of workflows
    magnitudes     constants below; the inputs of the policy's advantage
    times          affect no decision but have bounds, because they enter the journal, metrics and traces

docs/protocol.md has the table. A record that passes cannot raise in the orchestrator, and the trainer does not refuse
it. Checks whole arrays at once: the cost is a few microseconds per segment. Independent of slots and senders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from services.common.config.recipe import Recipe
from services.common.records import kept_tokens
from services.common.records.refusals import Refusal
from services.common.records.refusals import RefusalReason as Reason
from services.common.records.types import (
    LEAST_TRAINED_TEMPERATURE,
    NO_TIMING,
    Logprobs,
    Purpose,
    RolloutFailure,
    RolloutTiming,
    Segment,
    Sequence,
    TaskGroupOrder,
    TokenSource,
    Trajectory,
)
from services.common.rpc.limits import REQUEST_BYTES
from services.orchestrator.state.groups import GroupBy, group_key

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

    def fault_of_trained(self, sequence: Sequence) -> str:
        """Reason for which the trainer would refuse a sequence of a recorded batch; empty for a valid one. The record
        may be older than the known vocabulary size."""
        bounds = self.policies[sequence.policy]
        written = [segment for segment in sequence.segments if segment.num_tokens]
        try:
            _check_ids(sequence, bounds.vocab_size)
            for segment in written:
                if segment.kept:
                    kept_tokens.check(segment.kept, segment.token_ids, bounds.vocab_size)
        except (RecordRefusedError, ValueError) as error:
            return str(error)
        return "the sequence begins with a token of the policy" if written and written[0].is_policy else ""

    def check(self, trajectory: Trajectory, order: TaskGroupOrder, newest: Callable[[str], int]) -> None:
        """``newest``: the newest version of a policy in the ledger.

        Raises:
            RecordRefusedError: a value of the record is beyond its bound.
        """
        _check_reward("the reward", trajectory.reward)
        if not 1 <= len(trajectory.sequences) <= self._max_sequences:
            refuse(
                Reason.COUNT,
                f"the trajectory has {len(trajectory.sequences)} sequences; it must have 1 to {self._max_sequences} "
                "(workflow.settings.max_sequences raises the bound)",
            )
        num_tokens = 0
        for position, sequence in enumerate(trajectory.sequences):
            _check_parent(sequence, position)
            bounds = self.policies.get(sequence.policy)
            if bounds is None:
                refuse(Reason.POLICY, f"unknown policy {shown(sequence.policy)}")
            if order.policies and sequence.policy not in order.policies:
                refuse(Reason.POLICY, f"a sequence of {sequence.policy} in a task group of {', '.join(order.policies)}")
            num_tokens += _check_sequence(sequence, bounds, order, newest(sequence.policy))
        if num_tokens > MOST_TOKENS:
            refuse(Reason.LENGTH, f"the trajectory has {num_tokens} tokens; at most {MOST_TOKENS} are taken")
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
                    Reason.REWARD,
                    f"sequences of {sequence.policy} that are compared as one have the rewards {first:g} and "
                    f"{sequence.reward:g}: advantage pass_at_k needs one of 0 or 1",
                )


def _check_reward(what: str, reward: float) -> None:
    if not -MOST_REWARD <= reward <= MOST_REWARD:  # NaN too
        refuse(Reason.REWARD, f"{what} is {reward:g}; rewards are from {-MOST_REWARD:g} to {MOST_REWARD:g}")


def _check_parent(sequence: Sequence, position: int) -> None:
    """A sequence comes from an earlier one, so no sequence comes from itself."""
    if sequence.parent is not None and not 0 <= sequence.parent < position:
        refuse(
            Reason.NUMBER, f"sequence {position} has the parent {sequence.parent}; a parent comes before its children"
        )


def _check_sequence(sequence: Sequence, bounds: PolicyBounds, order: TaskGroupOrder, newest: int) -> int:
    """Check a sequence; returns its number of tokens."""
    trains = order.purpose is Purpose.TRAIN
    name = sequence.policy
    check_name(sequence.role, "a role")
    if not 0 <= sequence.attempt < MOST_ATTEMPTS or not 0 <= sequence.thread < MOST_THREADS:
        refuse(
            Reason.NUMBER,
            f"a sequence of {name} is attempt {sequence.attempt}, thread {sequence.thread}; attempts are from 0 to "
            f"{MOST_ATTEMPTS - 1}, threads from 0 to {MOST_THREADS - 1}",
        )
    _check_reward("the reward of a sequence", sequence.reward)
    if trains and bounds.takes_reward is not None and not bounds.takes_reward(sequence.reward):
        refuse(
            Reason.REWARD,
            f"the reward of a sequence of {name} is {sequence.reward:g}, from which its advantage cannot be made",
        )
    check_metrics(sequence.metrics, "a sequence")
    num_tokens = _check_lengths(sequence, bounds, order)
    _check_arrays(sequence, bounds.vocab_size)
    required = order.required_versions.get(name)
    for segment in sequence.segments:
        version, temperature = segment.weight_version, segment.temperature
        if not -1 <= version <= newest:
            fault = f"is from the future: the newest is {newest}" if version > newest else "does not exist"
            refuse(Reason.VERSION, f"version {version} of {name} {fault}")
        if temperature is not None and not 0 <= temperature <= MOST_TEMPERATURE:  # NaN too
            refuse(Reason.TEMPERATURE, f"a segment of {name}: its temperature is {temperature}")
        if not segment.is_policy:
            continue
        if required is not None and segment.num_tokens and version != required:
            refuse(Reason.VERSION, f"sampled from version {version} of {name}, not {required}")
        if trains:
            _check_trained(segment, name, bounds, order)
    return num_tokens


def _check_lengths(sequence: Sequence, bounds: PolicyBounds, order: TaskGroupOrder) -> int:
    """Check turns and segments; returns the total number of tokens. In training the first token belongs to the environment."""
    name, most = sequence.policy, order.sampling.max_new_tokens
    num_tokens = turn = 0
    for segment in sequence.segments:
        size = len(segment.token_ids)
        if segment.source is TokenSource.POLICY:
            if not num_tokens and size and order.purpose is Purpose.TRAIN:
                refuse(Reason.LENGTH, f"a sequence of {name} begins with a token of the policy: the prompt is missing")
            turn += size
            if turn > most:
                refuse(
                    Reason.LENGTH,
                    f"a turn of {name} has {turn} tokens or more; sampling.max_new_tokens of its order is {most}",
                )
        elif size:
            turn = 0
        num_tokens += size
    if not 1 <= num_tokens <= bounds.context_length:
        refuse(
            Reason.LENGTH,
            f"a sequence of {name} has {num_tokens} tokens; it must have 1 to {bounds.context_length} "
            f"(policies.{name}.model.context_length)",
        )
    if len(sequence.segments) > min(MOST_SEGMENTS, num_tokens + EMPTY_SEGMENTS):
        refuse(
            Reason.COUNT,
            f"a sequence of {name} has {len(sequence.segments)} segments for {num_tokens} tokens; at most "
            f"{MOST_SEGMENTS} are taken",
        )
    return num_tokens


def _check_arrays(sequence: Sequence, vocab_size: int | None) -> None:
    """Check token ids and log-probabilities of all segments of a sequence at once."""
    _check_ids(sequence, vocab_size)
    own = [segment.logprobs for segment in sequence.segments if len(segment.logprobs)]
    _check_logprobs(own, Reason.LOGPROB, f"a log-probability of {sequence.policy}")
    teacher = [segment.teacher_logprobs for segment in sequence.segments if len(segment.teacher_logprobs)]
    _check_logprobs(teacher, Reason.TEACHER, f"a log-probability of the teacher of {sequence.policy}")


def _check_ids(sequence: Sequence, vocab_size: int | None) -> None:
    if not sequence.segments:
        return
    largest = MOST_ID if vocab_size is None else vocab_size - 1
    ids = _joined([segment.token_ids for segment in sequence.segments])
    # Negative ids are the largest of all as unsigned ones.
    if int(np.maximum.reduce(ids.view(np.uint32), initial=0)) > largest:
        wrong = int(ids[(ids < 0) | (ids > largest)][0])
        refuse(
            Reason.TOKEN_ID,
            f"a sequence of {sequence.policy} has the token id {wrong}, and the policy has ids 0 to {largest}: its "
            "replica has another model or tokenizer",
        )


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _check_logprobs(arrays: list[Logprobs], reason: Reason, what: str) -> None:
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
            Reason.TEMPERATURE,
            f"a segment of {name}: its temperature is {temperature}; training needs samples at temperature "
            f"{LEAST_TRAINED_TEMPERATURE:g} or more",
        )
    if segment.kept:
        try:
            kept_tokens.check(segment.kept, segment.token_ids, bounds.vocab_size)
        except ValueError as error:
            refuse(Reason.KEPT_TOKENS, f"a segment of {name}: {error}")
    elif segment.num_tokens and order.sampling.is_truncated:
        refuse(
            Reason.KEPT_TOKENS,
            f"a segment of {name}: the tokens that top_k, top_p and min_p kept are missing: the engine of its "
            "replica does not report them",
        )
    num_scored = len(segment.teacher_logprobs)
    if bounds.taught and num_scored != segment.num_tokens:
        refuse(Reason.TEACHER, f"a segment of {name} lacks the log-probabilities of its teacher")
    if num_scored and not bounds.taught:
        refuse(
            Reason.TEACHER, f"a segment of {name} has log-probabilities of a teacher, and this policy has no teacher"
        )

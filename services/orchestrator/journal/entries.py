"""The journal's records and their JSON lines, ``to_json(record)`` and ``from_json(kind, object)``; scores of evaluations.

The arrays of a segment are packed as text: bytes by significance (all lowest bytes, then all next ones), in base64.
Bytes of one significance are alike, so zstd halves them: 6.4 bytes per token with its log-probability, against 7.3 of
decimal numbers, for less time to write and read. ``plain_trajectory`` gives a line with lists of numbers instead.
"""

from __future__ import annotations

import base64
import math
import operator
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from statistics import fmean
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import orjson

from services.common import records
from services.common.errors import CorruptDataError
from services.common.records import (
    Interval,
    MinibatchTotals,
    RolloutFailure,
    Segment,
    Task,
    TaskGroupOrder,
    TokenSource,
    Trajectory,
    WeightVersion,
)
from services.orchestrator.groups import RunState

T = TypeVar("T")


# --- Scores of an evaluation: avg@k, pass@k and differences with 95% intervals, per dataset and overall.


_Z = 1.959964  # 95%, two-sided


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAt:
    """Chance that k samples of an item hold a right one."""

    k: int
    share: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScore:
    """One dataset of an evaluation pass. Rewards are means in their own unit; pass@k are shares in [0, 1]."""

    name: str
    num_items: int
    samples_per_item: int
    mean_reward: Estimate | None  # None where every sample failed: a failure is no reward
    pass_at: tuple[PassAt, ...]  # k = 1, 2, 4, ... up to the samples
    failed: tuple[str, ...]  # task ids with a failed sample, in order
    items: str = ""  # digest of the tasks: scores with the same one are of the same items
    item_rewards: tuple[float, ...] = ()  # mean over the samples of each item, in order
    difference: Estimate | None = None  # to the first evaluation of its kind; None for that one, or with one item


def score(
    name: str,
    task_ids: Sequence[str],
    rewards: Sequence[Sequence[float]],
    failed: Sequence[int],
    pass_reward: float,
    items: str = "",
) -> DatasetScore:
    """``rewards``: (items, samples), every item with the same number, those of its ``failed`` samples last: they never
    pass, with any reward. Where every sample failed there is no estimate."""
    num_samples = len(rewards[0])
    played = sum(failed) < num_samples * len(rewards)
    means = tuple(map(fmean, rewards))
    passed = [
        sum(reward >= pass_reward for reward in item[: num_samples - num_failed])
        for item, num_failed in zip(rewards, failed, strict=True)
    ]
    ks = [2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples]
    return DatasetScore(
        name=name,
        num_items=len(rewards),
        samples_per_item=num_samples,
        mean_reward=estimate(means) if played else None,
        pass_at=tuple(
            PassAt(k=k, share=estimate([pass_at_k(num_samples, count, k) for count in passed])) for k in ks if played
        ),
        failed=tuple(task_id for task_id, num_failed in zip(task_ids, failed, strict=True) if num_failed),
        items=items,
        item_rewards=means,
    )


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., arXiv 2107.03374.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate(items: Sequence[float]) -> Estimate:
    """Mean over items with its interval; shares get Wilson's, which never leaves [0, 1] and is never empty.

    >>> estimate([1.0, 0.0, 1.0, 1.0]).value
    0.75
    """
    count = len(items)
    mean = fmean(items)
    error = math.sqrt(math.fsum((item - mean) ** 2 for item in items) / (count - 1) / count) if count > 1 else 0.0
    if min(items) < 0.0 or max(items) > 1.0:
        return Estimate(mean, mean - _Z * error, mean + _Z * error)
    variance = error**2  # 0 for an error that is too small for its square
    observations = max(float(count), mean * (1.0 - mean) / variance) if variance else float(count)
    spread = _Z**2 / observations
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(mean * (1.0 - mean) / observations + spread / (4 * observations)) / (1 + spread)
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def overall(scores: Sequence[DatasetScore]) -> float | None:
    """Mean reward over datasets, each with the same weight; None without one, and unless every dataset has a value."""
    return _overall([found.mean_reward for found in scores])


def overall_pass_at(scores: Sequence[DatasetScore], k: int) -> float | None:
    """pass@k over datasets, each counted once; None as in ``overall``, and where k is none of theirs."""
    return _overall([next((passed.share for passed in found.pass_at if passed.k == k), None) for found in scores])


def _overall(found: Sequence[Estimate | None]) -> float | None:
    values = [estimate.value for estimate in found if estimate is not None]
    return fmean(values) if found and len(values) == len(found) else None


def difference(base: DatasetScore, other: DatasetScore) -> Estimate | None:
    """Mean difference of the rewards of ``other`` and ``base``, item by item; None for different items, for a single item,
    and where every sample of one failed."""
    if not base.items or base.items != other.items or None in (base.mean_reward, other.mean_reward):
        return None
    return mean_difference([_differences(base, other)])


def _differences(base: DatasetScore, other: DatasetScore) -> list[float]:
    return [b - a for a, b in zip(base.item_rewards, other.item_rewards, strict=True)]


def compared(base: Sequence[DatasetScore], scores: Sequence[DatasetScore]) -> tuple[DatasetScore, ...]:
    """``scores`` with their differences to the datasets of the same names in ``base``."""
    known = {found.name: found for found in base}
    return tuple(replace(s, difference=difference(known[s.name], s) if s.name in known else None) for s in scores)


def overall_difference(base: Sequence[DatasetScore], other: Sequence[DatasetScore]) -> Estimate | None:
    """The mean over datasets, each with the same weight; None unless every dataset has a value."""
    if len(base) != len(other) or any(difference(a, b) is None for a, b in zip(base, other, strict=True)):
        return None
    return mean_difference([_differences(a, b) for a, b in zip(base, other, strict=True)])


def mean_difference(datasets: Sequence[Sequence[float]]) -> Estimate | None:
    """Mean over datasets of the mean over their items, with its t interval (degrees of freedom after Welch and Satterthwaite);
    None without a dataset, and with one of fewer than two items.

    >>> mean_difference([[1.0, 0.0, 0.0, 1.0]])
    Estimate(value=0.5, low=-0.41869311315694757, high=1.4186931131569476)
    """
    if not datasets or any(len(items) < 2 for items in datasets):
        return None
    means = list(map(fmean, datasets))
    variances = [  # of the means
        math.fsum((item - mean) ** 2 for item in items) / (len(items) - 1) / len(items)
        for items, mean in zip(datasets, means, strict=True)
    ]
    value, variance = fmean(means), math.fsum(variances)
    if not variance:
        return Estimate(value, value, value)
    freedom = 1.0 / math.fsum(
        (v / variance) ** 2 / (len(items) - 1) for v, items in zip(variances, datasets, strict=True)
    )
    half = t_quantile(freedom) * math.sqrt(variance) / len(means)
    return Estimate(value, value - half, value + half)


def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t, for 1 degree of freedom or more, to within 0.2%: bisection on its distribution
    function, which Simpson's rule integrates over atan(t / sqrt(freedom)).

    >>> round(t_quantile(1), 2), round(t_quantile(9), 3)
    (12.71, 2.262)
    """
    if freedom > 1000:
        return _Z
    wanted = 0.475 * math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(40):
        angle = (low + high) / 2
        low, high = (angle, high) if _integral_of_cosine(angle, freedom - 1) < wanted else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _integral_of_cosine(angle: float, power: float, num_steps: int = 100) -> float:
    """Of cos(x) ** power, from 0 to ``angle``."""
    step = angle / num_steps
    inner = math.fsum((4 if i % 2 else 2) * math.pow(math.cos(i * step), power) for i in range(1, num_steps))
    return (1.0 + inner + math.pow(math.cos(angle), power)) * step / 3


# --- Records of the journal, by kind.


# Kinds of records; each is the name of its segment files.
RUN = "runs"
GROUP = "task_groups"
ASSIGNMENT = "assignments"
TRAJECTORY = "trajectories"
FAILURE = "failures"
VERDICT = "verdicts"  # the fates of a task group's advantage groups at its completion
CLOSED = "closed_groups"
OBSERVATION = "observations"  # the rewards of a prompt, for the curation
BATCH = "batches"
VERSION = "versions"
EVALUATION_START = "evaluation_starts"
EVALUATION = "evaluations"
STATE = "states"
SET_ASIDE = "set_aside"  # a record that is not used, and why
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """An issued task group."""

    order: TaskGroupOrder
    position: int
    evaluation: str
    replica_id: str
    incarnation: str
    born: Mapping[str, int] = field(default_factory=dict)  # policy -> version that the replica held


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    """One sequence of a recorded batch, without its tokens."""

    sequence_id: str
    minibatch: int
    position: int  # order inside the minibatch
    group_mean: float
    group_std: float
    group_size: int  # rewards in these statistics
    staleness: int
    num_tokens: int
    reward: float | None = None  # the trained reward; None: as in the trajectory
    replayed: bool = False  # an earlier batch contained the sequence, too
    trained_from: int = 0  # policy tokens of older versions are masked; 0 masks none
    num_masked_tokens: int = 0
    advantage_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch, assembled once for (policy, training step)."""

    policy: str
    training_step: int
    entries: tuple[BatchEntry, ...]
    minibatches: tuple[MinibatchTotals, ...]
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    name: str  # "start/greedy"
    versions: Mapping[str, int]
    newest_versions: Mapping[str, int]  # differ from `versions` for an unpinned pass: the range of used versions
    pinned: bool
    mean_reward: (
        float | None
    )  # over datasets, each counted once; failed ones as `evaluation.failed_reward` says; None where every sample of a dataset failed
    num_trajectories: int
    num_failed: int
    datasets: tuple[DatasetScore, ...] = ()
    roles: Mapping[str, float] = field(default_factory=dict)  # "policy/role/attempt" -> mean reward of its sequences
    compared_with: str = ""  # the run's first evaluation of this kind; empty for that one
    difference: Estimate | None = None  # to that pass, of mean_reward, paired by items; None where unknown
    elapsed_s: float = 0.0  # from the begin of the run to its last trajectory
    num_opaque: int = 0  # trajectories whose reward the program can forge, by opaque tests


def pairs(values: Mapping[str, float]) -> list[Json]:
    return [{"name": name, "value": float(value)} for name, value in values.items()]


def from_pairs(values: list[Json]) -> dict[str, float]:
    # JSON has no NaN: null replaces NaN.
    return {v["name"]: math.nan if v["value"] is None else float(v["value"]) for v in values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Open slots that are issued again."""

    task_group_id: str
    replica_id: str
    incarnation: str
    born: Mapping[str, int]  # start versions by policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The end of a task group."""

    task_group_id: str
    reason: records.ClosedReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The rewards of a prompt's task group, for the curation."""

    task_group_id: str
    source: str
    row: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A published version."""

    version: WeightVersion
    checkpoint_step: int = 0  # of the newest durable checkpoint then
    metrics: Mapping[str, float] = field(default_factory=dict)  # of its training step
    compute: tuple[Interval, ...] = ()  # intervals in which the trainer computed the step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStart:
    evaluation_id: str
    versions: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """Values that no other record holds."""

    phase: RunState
    paused: bool
    counters: Mapping[str, float]
    timeline: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFate:
    """Fate of one sequence at the completion of its task group."""

    index: int  # slot of its rollout
    position: int  # in the rollout's trajectory
    num_tokens: int  # that the policy wrote
    fate: records.GroupFate


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """Fate of one advantage group at the completion of its task group."""

    policy: str
    role: str
    attempt: int
    num_sequences: int  # of the group
    num_kept: int  # that went into the buffer
    mean: float
    std: float
    outcome: records.GroupFate
    num_expired: int = 0  # members that were too old already; they count in mean and std
    members: tuple[MemberFate, ...] = ()  # all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The verdicts of a complete task group."""

    task_group_id: str
    advantage_groups: tuple[GroupVerdict, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A record that is set aside: its identity, its position, and the reason."""

    kind: str
    key: str
    number: int  # of the record, in the order in which records were submitted
    segment: int
    offset: int
    reason: records.SetAsideReason
    detail: str = ""


def batch_key(policy: str, training_step: int) -> str:
    return f"{policy}/{training_step}"


def trajectory_key(task_group_id: str, index: int) -> str:
    return f"{task_group_id}/{index}"


def plain_trajectory(record: Json) -> Json:
    """A trajectory's line with its token ids and log-probabilities as lists, for readers other than Rollmill."""

    def plain(segment: Json) -> Json:
        return {
            **segment,
            "token_ids": unpack_tokens(segment["token_ids"], segment["num_tokens"]).tolist(),
            "logprobs": unpack_floats(segment["logprobs"]),  # float32: orjson writes the shortest decimals
            "teacher_logprobs": unpack_floats(segment["teacher_logprobs"]),
        }

    return {**record, "sequences": [{**s, "segments": list(map(plain, s["segments"]))} for s in record["sequences"]]}


_TOKEN = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_WIDTH = 4  # bytes of either


def pack_tokens(token_ids: npt.NDArray[np.int32]) -> str:
    """Token ids, [num_tokens] int32: three bytes each where sufficient."""
    data = token_ids.astype(_TOKEN, copy=False).tobytes()
    return _planes(data, _WIDTH if data[_WIDTH - 1 :: _WIDTH].strip(b"\0") else _WIDTH - 1)


def unpack_tokens(text: str, num_tokens: int) -> npt.NDArray[np.int32]:
    """[num_tokens] int32; raises ``CorruptDataError`` for text that does not hold as many."""
    return _array(text, num_tokens, _TOKEN).astype(np.int32, copy=False)


def pack_floats(values: npt.NDArray[np.float32]) -> str:
    """Log-probabilities, [num_tokens] float32, bit by bit."""
    return _planes(values.astype(_FLOAT, copy=False).tobytes(), _WIDTH)


def unpack_floats(text: str) -> npt.NDArray[np.float32]:
    """[num_tokens] float32, bit by bit; raises ``CorruptDataError`` for text that ``pack_floats`` does not write."""
    return _array(text, None, _FLOAT).astype(np.float32, copy=False)


def _planes(data: bytes, width: int) -> str:
    """The lowest byte of every number, the next of every number, and so on, for ``width`` bytes. Slices of bytes: for some
    dozens of numbers they take half as long as numpy does, and no longer for thousands."""
    planes = [data[significance::_WIDTH] for significance in range(width)]
    return b2a_base64(b"".join(planes), newline=False).decode("ascii")


def _array(text: str, count: int | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not text and not count:
        return np.zeros(0, dtype)
    try:
        data = np.frombuffer(a2b_base64(text), np.uint8)
    except (Error, ValueError) as error:
        raise CorruptDataError(f"an array of a record is not base64: {error}") from error
    count = len(data) // _WIDTH if count is None else count
    width = len(data) // count if count > 0 else 0
    if not 0 < width <= _WIDTH or width * count != len(data):
        raise CorruptDataError(f"an array of a record has {len(data)} bytes for {count} numbers")
    found = np.zeros((count, _WIDTH), np.uint8)
    found[:, :width] = data.reshape(width, count).T
    return found.view(dtype)[:, 0]


# --- Conversion by the types of the fields, looked up once for each dataclass:
#
#     int, bool, str, None               the same
#     float                              a number; NaN is null
#     Enum                               its value
#     tuple[X, ...], X | None            a list; the same or null
#     Mapping[str, float]                [{"name": ..., "value": ...}, ...], so that all lines have the same columns
#     Mapping[str, int]                  versions by policy: [{"policy": ..., "number": ...}, ...]
#     Mapping[str, Any]                  text with its JSON
#     a dataclass                        an object; a segment by hand, because most of the time goes there


_Convert = Callable[[Any], Any]


# Fields whose own fields stand in the object of the record, and other names.
_SPREAD = {(GroupRecord, "order"), (TaskGroupOrder, "task"), (TaskGroupOrder, "sampling"), (VersionRecord, "version")}
_RENAMED = {(BatchRecord, "entries"): "sequences", (Task, "data"): "data_json"}


def to_json(record: Any) -> Json:
    """The JSON object of a record; a JSON object is returned as it is."""
    if isinstance(record, Mapping):
        return cast(Json, record)
    if isinstance(record, Segment):
        return _segment_to_json(record)
    found: Json = {}
    kind: Any = type(record)
    for name, attribute, write, _ in _fields_of(kind):
        value = getattr(record, attribute) if write is None else write(getattr(record, attribute))
        if name:
            found[name] = value
        else:
            found |= value
    return found


def from_json(kind: type[T], record: Json) -> T:
    """The record of this kind in a JSON object. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for another one, and
    ``CorruptDataError`` for arrays that are not whole."""
    what: Any = kind
    if what is Segment:
        return cast(T, _segment_from_json(record))
    values = {}
    for name, attribute, _, read in _fields_of(what):
        value = record[name] if name else record
        values[attribute] = value if read is None else read(value)
    return kind(**values)


@cache
def _fields_of(kind: Any) -> list[tuple[str, str, _Convert | None, _Convert | None]]:
    """(name in JSON, empty where the field is spread; attribute; how it is written and read, None where JSON has the same
    value) of every field."""
    hints = get_type_hints(kind)
    return [
        (
            "" if (kind, f.name) in _SPREAD else _RENAMED.get((kind, f.name), f.name),
            f.name,
            *_converters(hints[f.name]),
        )
        for f in fields(kind)
    ]


def _converters(hint: Any) -> tuple[_Convert | None, _Convert | None]:
    """How a value of this type is written and read."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        write, read = _converters(args[0])
        return write and partial(_if_any, write), read and partial(_if_any, read)
    if origin is tuple:
        write, read = _converters(args[0])
        return write and partial(_each, list, write), partial(_each, tuple, read) if read else tuple
    if origin is Mapping:
        if args[1] is Any:
            return lambda data: orjson.dumps(data).decode(), orjson.loads
        return (pairs, from_pairs) if args[1] is float else (_versions_to_json, _versions_from_json)
    if hint is float:
        return float, float
    if isinstance(hint, type) and issubclass(hint, Enum):
        return operator.attrgetter("value"), hint
    return (to_json, partial(from_json, cast(Any, hint))) if is_dataclass(hint) else (None, None)


def _if_any(convert: _Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _each(make: _Convert, convert: _Convert, values: Iterable[Any]) -> Any:
    return make(map(convert, values))


def _versions_to_json(versions: Mapping[str, int]) -> list[Json]:
    return [{"policy": policy, "number": number} for policy, number in versions.items()]


def _versions_from_json(found: list[Json]) -> dict[str, int]:
    return {version["policy"]: version["number"] for version in found}


def _segment_to_json(segment: Segment) -> Json:
    return {
        "source": segment.source.value,
        "weight_version": segment.weight_version,
        "mixed_cache": segment.mixed_cache,
        "kept": base64.b64encode(segment.kept).decode() if segment.kept else "",
        "temperature": segment.temperature,
        "num_tokens": segment.num_tokens,
        "token_ids": pack_tokens(segment.token_ids),
        "logprobs": pack_floats(segment.logprobs),
        "teacher_logprobs": pack_floats(segment.teacher_logprobs),
    }


def _segment_from_json(found: Json) -> Segment:
    return Segment(
        source=TokenSource(found["source"]),
        token_ids=unpack_tokens(found["token_ids"], found["num_tokens"]),
        logprobs=unpack_floats(found["logprobs"]),
        weight_version=found["weight_version"],
        mixed_cache=found["mixed_cache"],
        kept=base64.b64decode(found["kept"]),
        temperature=found["temperature"],
        teacher_logprobs=unpack_floats(found["teacher_logprobs"]),
    )


def settled_batch_from_json(record: Json) -> BatchRecord:
    """A batch record without its sequences, which were trained long ago."""
    return from_json(BatchRecord, {**record, "sequences": [], "minibatches": []})


RECORDS: Mapping[str, Any] = {
    GROUP: GroupRecord,
    ASSIGNMENT: Assignment,
    TRAJECTORY: Trajectory,
    FAILURE: RolloutFailure,
    VERDICT: Verdicts,
    OBSERVATION: Observation,
    BATCH: BatchRecord,
    VERSION: VersionRecord,
    EVALUATION_START: EvaluationStart,
    EVALUATION: EvaluationResult,
    STATE: StateRecord,
}


def read(kind: str, record: Json) -> Any:
    """The record of a kind in a JSON object; raises as ``from_json``."""
    return from_json(RECORDS[kind], record)

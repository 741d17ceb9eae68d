"""From advantage groups to a recorded batch (minibatch, position and statistics of every sequence, the ranks' shares), and
from the journal back, whole or without what is lost; also without an orchestrator.

Sequences go to minibatches independent of the number of ranks, then those of each minibatch to ranks. Both splits place
sequences in decreasing length, each into the bin with the fewest tokens so far (first such bin). That balances tokens,
and spreads long and short sequences over all bins; filling one bin after another would train all the long ones in the
first minibatch. Pure: every rank, and every repetition, gets the same answer.

``StepStatistics`` counts the rollouts between two batches of a policy, over all of its tasks and by their sources.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import fmean

from services.common import records as fates
from services.common.errors import BatchLostError, CorruptDataError
from services.common.records import MinibatchTotals, RankBatch, StepFact, TokenSequence, TrainingSequence, Trajectory
from services.common.telemetry.metrics import ROLE_REWARD, StepKey, source_key
from services.orchestrator.buffer.buffer import AdvantageGroup, Member, is_timeout, mask_sequence
from services.orchestrator.groups import GroupBy, Outcome, group_key, split_sequence_id
from services.orchestrator.journal import entries as records
from services.orchestrator.journal.entries import BatchEntry, BatchRecord
from services.orchestrator.journal.reader import UNREADABLE, JournalReader

# Sequences: to put together, check or cut a batch of more takes many milliseconds, and is done in a thread, because orders
# and records would wait meanwhile.
MOST_AT_ONCE = 1024
MOST_ROLES = 256  # names of roles are words of workflows: those beyond are told together
OTHER_ROLES = "other"
_OF_ENTRY = set(TrainingSequence.__slots__) - {"sequence"}


_COUNTED = (
    StepKey.ROLLOUTS_FINISHED, StepKey.FAILURES, StepKey.GROUPS_EQUAL_DROPPED, StepFact.SEQUENCES_EXPIRED,
    StepFact.TOKENS_EXPIRED, StepFact.SLOTS_CANCELLED, StepFact.TIMEOUTS, StepFact.TRUNCATED_MASKED,
    StepFact.REWARDS_CLIPPED,
)  # fmt: skip


@dataclass(slots=True)
class RewardMeans:
    """Mean rewards by role; names beyond ``MOST_ROLES`` share one."""

    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, role: str, reward: float) -> None:
        if role not in self._sums and len(self._sums) >= MOST_ROLES:
            role = OTHER_ROLES
        total, count = self._sums.get(role, (0.0, 0))
        self._sums[role] = (total + reward, count + 1)

    def means(self) -> dict[str, float]:
        return {role: total / count for role, (total, count) in sorted(self._sums.items())}


@dataclass(slots=True)
class StepStatistics:
    """Statistics of a policy since its previous batch was assembled."""

    counts: Counter[StepKey | StepFact] = field(default_factory=Counter)
    reward_sum: float = 0.0
    roles: RewardMeans = field(default_factory=RewardMeans)  # by "role/attempt"
    num_shaped: int = 0  # sequences with a judged length
    num_overlong: int = 0
    penalty_sum: float = 0.0
    trained_sum: float = 0.0  # of the transformed rewards of all complete groups, also of dropped ones
    num_transformed: int = 0

    def note(self, policy: str, outcome: Outcome) -> None:
        """Count the outcome of a slot of a task group of the policy."""
        if not isinstance(outcome, Trajectory):
            cancelled = outcome.reason == fates.TOO_OLD
            self.counts[StepFact.SLOTS_CANCELLED if cancelled else StepKey.FAILURES] += 1
            self.counts[StepFact.TIMEOUTS] += is_timeout(outcome)
            return
        self.counts[StepKey.ROLLOUTS_FINISHED] += 1
        self.reward_sum += outcome.reward
        for sequence in outcome.sequences:
            if sequence.policy == policy:
                self.roles.add(f"{sequence.role}/{sequence.attempt}", sequence.reward)

    def summary(self) -> dict[str, float]:
        """Statistics as metrics; without ``rollout_reward_mean`` when no trajectory arrived."""
        values = {name.value: float(self.counts[name]) for name in _COUNTED}
        if self.num_transformed:
            values[StepKey.TRAINED_REWARD_MEAN.value] = self.trained_sum / self.num_transformed
        if finished := self.counts[StepKey.ROLLOUTS_FINISHED]:
            values[StepKey.ROLLOUT_REWARD_MEAN.value] = self.reward_sum / finished
        values |= {f"{ROLE_REWARD}{role}": mean for role, mean in self.roles.means().items()}
        if self.num_shaped:
            values[StepKey.OVERLONG_SHARE.value] = self.num_overlong / self.num_shaped
            values[StepKey.OVERLONG_PENALTY_MEAN.value] = self.penalty_sum / self.num_shaped
        return values


def of_batch(groups: Iterable[AdvantageGroup], entries: Mapping[str, BatchEntry]) -> dict[str, float]:
    """The metrics of each source's fresh sequences in a batch; ``entries`` by sequence id. Empty for one dataset."""
    by_source: dict[str, list[tuple[BatchEntry, int]]] = {}
    for group in groups:
        if group.source:
            found_here = ((entries[m.sequence_id], m.sequence.num_trained_tokens) for m in group.members)
            by_source.setdefault(group.source, []).extend(found_here)
    values: dict[str, float] = {}
    for source, rows in by_source.items():
        staleness = [entry.staleness for entry, _ in rows]
        found = {
            StepKey.BATCH_REWARD_MEAN: fmean(entry.reward or 0.0 for entry, _ in rows),
            StepKey.RESPONSE_TOKENS_MEAN: sum(tokens for _, tokens in rows) / len(rows),
            StepKey.STALENESS_MEAN: sum(staleness) / len(staleness),
            StepKey.STALENESS_MAX: float(max(staleness)),
        }
        values |= {source_key(source, key): value for key, value in found.items()}
    return values


def spread(num_tokens: list[int], num_bins: int) -> list[int]:
    """The bin of each sequence.

    >>> spread([5, 9, 4, 8], 2)
    [1, 0, 0, 1]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; it must be 1 or more")
    # Count before index, so that sequences of no tokens spread as well. An empty bin goes first, so no more are ever used
    # than there are sequences, however many a caller claims to have.
    bins = [(0, 0, index) for index in range(min(num_bins, max(1, len(num_tokens))))]
    result = [0] * len(num_tokens)
    for _, position in sorted((-number, position) for position, number in enumerate(num_tokens)):
        tokens, count, index = bins[0]
        heapq.heapreplace(bins, (tokens + num_tokens[position], count + 1, index))
        result[position] = index
    return result


def rank_share(num_tokens: list[int], minibatch_of: list[int], rank: int, num_ranks: int) -> list[int]:
    """Which sequences of the batch one rank trains: its bin of every minibatch, in batch order.

    Over all ranks every sequence appears exactly once.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}; it must be at least 0 and less than num_ranks ({num_ranks})")
    share: list[int] = []
    for minibatch in range(max(minibatch_of, default=-1) + 1):
        positions = [p for p, m in enumerate(minibatch_of) if m == minibatch]
        ranks = spread([num_tokens[p] for p in positions], num_ranks)
        share.extend(p for p, r in zip(positions, ranks, strict=True) if r == rank)
    return sorted(share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    record: BatchRecord
    sequences: Mapping[str, TokenSequence]  # by sequence id
    replayed: bool  # recorded before this call

    def share(self, rank: int, num_ranks: int) -> RankBatch:
        """One rank's sequences of every minibatch, ordered by (minibatch, position)."""
        entries = self.record.entries
        chosen = rank_share([e.num_tokens for e in entries], [e.minibatch for e in entries], rank, num_ranks)
        ordered = sorted((entries[p] for p in chosen), key=attrgetter("minibatch", "position"))
        return RankBatch(
            policy=self.record.policy,
            training_step=self.record.training_step,
            minibatches=self.record.minibatches,
            sequences=tuple(
                TrainingSequence(
                    sequence=self.sequences[e.sequence_id], **{name: getattr(e, name) for name in _OF_ENTRY}
                )
                for e in ordered
            ),
        )


def assemble(
    policy: str,
    training_step: int,
    groups: Iterable[AdvantageGroup],
    num_minibatches: int,
    statistics: Mapping[str, float],
    replayed: Iterable[AdvantageGroup] = (),
) -> tuple[BatchRecord, dict[str, TokenSequence]]:
    """The batch of a training step, which starts from version ``training_step - 1``, and its sequences by id.

    ``groups`` are fresh, ``replayed`` ones were trained before. Staleness is reported for each kind.
    """
    fresh = list(groups)
    flat = [(group, member, False) for group in fresh for member in group.members]
    flat += [(group, member, True) for group in replayed for member in group.members]
    num_tokens = [member.sequence.num_tokens for _, member, _ in flat]
    minibatch_of = spread(num_tokens, num_minibatches)
    positions = [0] * num_minibatches
    entries: list[BatchEntry] = []
    for (group, member, again), tokens, minibatch in zip(flat, num_tokens, minibatch_of, strict=True):
        oldest = member.sequence.min_version
        entries.append(
            BatchEntry(
                sequence_id=member.sequence_id,
                minibatch=minibatch,
                position=positions[minibatch],
                group_mean=group.mean,
                group_std=group.std,
                group_size=group.num_compared,
                staleness=0 if oldest is None else training_step - 1 - oldest,
                num_tokens=tokens,
                reward=float(member.sequence.reward),
                replayed=again,
                trained_from=member.trained_from,
                num_masked_tokens=member.num_masked_tokens,
                advantage_scale=group.advantage_scale,
            )
        )
        positions[minibatch] += 1
    sequences = {member.sequence_id: member.sequence for _, member, _ in flat}
    minibatches = _totals(entries, sequences, num_minibatches)
    young = [entry.staleness for entry in entries if not entry.replayed]
    old = [entry.staleness for entry in entries if entry.replayed]
    masked = [e.num_masked_tokens for e in entries if e.num_masked_tokens and not e.replayed]
    trained = sum(totals.num_trained_tokens for totals in minibatches)
    found: dict[StepKey | StepFact, float] = {
        StepKey.BATCH_REWARD_MEAN: fmean(sequence.reward for sequence in sequences.values()),
        StepKey.STALENESS_MEAN: sum(young) / len(young),
        StepKey.STALENESS_MAX: max(young),
        StepKey.RESPONSE_TOKENS_MEAN: trained / len(sequences),
        StepKey.NUM_SEQUENCES: len(sequences),
        StepKey.NUM_TRAINED_TOKENS: trained,
        StepFact.SEQUENCES_MASKED: len(masked),
        StepFact.TOKENS_MASKED: sum(masked),
    }
    if old:
        found |= {StepKey.NUM_REPLAYED: len(old), StepKey.REPLAYED_STALENESS_MAX: max(old)}
    values = {**statistics, **{key.value: float(value) for key, value in found.items()}}
    if fresh[0].source:
        values |= of_batch(fresh, {entry.sequence_id: entry for entry in entries if not entry.replayed})
    record = BatchRecord(
        policy=policy, training_step=training_step, entries=tuple(entries), minibatches=minibatches, statistics=values
    )
    return record, sequences


def read_batch(reader: JournalReader, policy: str, training_step: int) -> Batch:
    """A recorded batch from the journal, also without an orchestrator; ``CorruptDataError`` for an incomplete one."""
    record, sequences = _read(reader, policy, training_step)
    missing = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if missing:
        lost = sorted({name.rpartition("/")[0] for name in missing})
        raise CorruptDataError(
            f"the batch of step {training_step} of {policy} lacks trajectories {', '.join(lost[:5])}: they are damaged "
            "(`rollmill journal RUN verify`), or were collected, as orchestrator.retention: needed does with those from "
            "before the oldest kept checkpoint"
        )
    return Batch(record=record, sequences=sequences, replayed=True)


def read_what_is_left(reader: JournalReader, policy: str, training_step: int) -> tuple[Batch, list[str]]:
    """A recorded batch without its lost sequences, and the ids of those.

    Raises:
        BatchLostError: no sequence of the batch is usable.
    """
    record, sequences = _read(reader, policy, training_step)
    lost = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if lost:
        record = reduced(record, sequences)
    return Batch(record=record, sequences=sequences, replayed=True), lost


def reduced(record: BatchRecord, sequences: Mapping[str, TokenSequence]) -> BatchRecord:
    """The batch reduced to these of its sequences; raises ``BatchLostError`` without any."""
    left = tuple(entry for entry in record.entries if entry.sequence_id in sequences)
    if not left:
        raise BatchLostError(
            f"no trajectory of the batch of step {record.training_step} of {record.policy} can be used any more: "
            "the next start of the orchestrator sets it aside, if its version is not published, and assembles another one"
        )
    return replace(record, entries=left, minibatches=_totals(left, sequences, len(record.minibatches)))


def _totals(
    entries: Iterable[BatchEntry], sequences: Mapping[str, TokenSequence], num_minibatches: int
) -> tuple[MinibatchTotals, ...]:
    counts = [[0, 0] for _ in range(num_minibatches)]
    for entry in entries:
        counts[entry.minibatch][0] += 1
        counts[entry.minibatch][1] += sequences[entry.sequence_id].num_trained_tokens
    return tuple(MinibatchTotals(num_sequences=n, num_trained_tokens=t) for n, t in counts)


def read_fresh_groups(
    reader: JournalReader, policy: str, training_step: int, group_by: GroupBy
) -> list[AdvantageGroup]:
    """The groups that a recorded batch trained first, in its order, without incomplete groups."""
    record, sequences = _read(reader, policy, training_step)
    found: dict[tuple[str, str, str, int], list[BatchEntry]] = {}
    lost: set[str] = set()  # task groups
    for entry in record.entries:
        task_group_id = split_sequence_id(entry.sequence_id)[0]
        sequence = sequences.get(entry.sequence_id)
        if sequence is None:
            lost.add(task_group_id)
        elif not entry.replayed:
            found.setdefault((task_group_id, *group_key(sequence, group_by)), []).append(entry)
    return [
        AdvantageGroup(
            task_group_id=task_group_id, policy=policy, role=role, attempt=attempt,
            members=tuple(
                Member(
                    sequence_id=e.sequence_id, sequence=sequences[e.sequence_id],
                    trained_from=e.trained_from, num_masked_tokens=e.num_masked_tokens,
                )
                for e in entries
            ),
            mean=entries[0].group_mean, std=entries[0].group_std, num_compared=entries[0].group_size, group_by=group_by,
            advantage_scale=entries[0].advantage_scale,
        )
        for (task_group_id, _, role, attempt), entries in found.items()
        if task_group_id not in lost
    ]  # fmt: skip


def _read(reader: JournalReader, policy: str, training_step: int) -> tuple[BatchRecord, dict[str, TokenSequence]]:
    """A recorded batch with its readable sequences."""
    key = records.batch_key(policy, training_step)
    found = reader.find(records.BATCH, [key]).get(key)
    if found is None:
        raise BatchLostError(f"the batch of step {training_step} of {policy} is not in the journal")
    record = records.from_json(records.BatchRecord, found)
    places = [split_sequence_id(entry.sequence_id) for entry in record.entries]
    keys = [records.trajectory_key(group, index) for group, index, _ in places]
    trajectories: dict[str, Trajectory] = {}
    for slot, value in reader.find(records.TRAJECTORY, keys).items():
        with contextlib.suppress(*UNREADABLE):  # a record that is no trajectory
            trajectories[slot] = records.from_json(Trajectory, value)
    sequences: dict[str, TokenSequence] = {}
    for entry, key, (_, _, position) in zip(record.entries, keys, places, strict=True):
        if key in trajectories:
            sequence = trajectories[key].sequences[position]
            if entry.trained_from:
                sequence = mask_sequence(sequence, entry.trained_from)
            if entry.reward is not None and entry.reward != sequence.reward:
                sequence = replace(sequence, reward=entry.reward)
            sequences[entry.sequence_id] = sequence
    return record, sequences

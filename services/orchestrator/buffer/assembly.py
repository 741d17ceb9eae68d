"""From advantage groups to a recorded batch: minibatch, position and statistics of every sequence, and the ranks' shares.

Sequences go to minibatches independent of the number of ranks, then those of each minibatch to ranks. Both splits place
sequences in decreasing length, each into the bin with the fewest tokens so far (first such bin). That balances tokens,
and spreads long and short sequences over all bins; filling one bin after another would train all the long ones in the
first minibatch. Pure: every rank, and every repetition, gets the same answer.

``StepStatistics`` counts the rollouts between two batches of a policy, over all of its tasks and by their sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.common import finite as finite_numbers
from services.common.finite import finite
from services.common.records import fates
from services.common.records.fates import StepFact
from services.common.records.types import MinibatchTotals, RankBatch, Sequence, TrainingSequence, Trajectory
from services.common.telemetry.metrics import ROLE_REWARD, StepKey, source_key
from services.orchestrator.buffer.experience import AdvantageGroup
from services.orchestrator.buffer.rewards import is_timeout
from services.orchestrator.journal.records import BatchEntry, BatchRecord
from services.orchestrator.state.groups import Outcome

# Sequences: to put together, check or cut a batch of more takes many milliseconds, and is done in a thread, because orders
# and records would wait meanwhile.
MOST_AT_ONCE = 1024
MOST_ROLES = 256  # names of roles are words of workflows: those beyond are told together
OTHER_ROLES = "other"
_OF_ENTRY = set(TrainingSequence.__slots__) - {"sequence"}


@dataclass(slots=True)
class StepStatistics:
    """Statistics of a policy since its previous batch was assembled."""

    reward_sum: float = 0.0
    num_trajectories: int = 0
    num_failures: int = 0
    num_groups_equal: int = 0
    num_expired: int = 0
    num_tokens_expired: int = 0
    num_cancelled: int = 0
    roles: dict[str, tuple[float, int]] = field(default_factory=dict)  # "role/attempt" -> rewards, sequences
    num_shaped: int = 0  # sequences with a judged length
    num_overlong: int = 0
    penalty_sum: float = 0.0
    num_timeouts: int = 0  # of the failures
    num_truncated_masked: int = 0
    num_clipped: int = 0
    trained_sum: float = 0.0  # of the transformed rewards of all complete groups, also of dropped ones
    num_transformed: int = 0

    def note(self, policy: str, outcome: Outcome) -> None:
        """Count the outcome of a slot of a task group of the policy."""
        if isinstance(outcome, Trajectory):
            self.note_roles(policy, outcome)
            self.reward_sum = finite(self.reward_sum + outcome.reward)
            self.num_trajectories += 1
        elif outcome.reason == fates.TOO_OLD:
            self.num_cancelled += 1
        else:
            self.num_failures += 1
            self.num_timeouts += is_timeout(outcome)

    def note_roles(self, policy: str, trajectory: Trajectory) -> None:
        for sequence in trajectory.sequences:
            if sequence.policy == policy:
                role = f"{sequence.role}/{sequence.attempt}"
                if role not in self.roles and len(self.roles) >= MOST_ROLES:
                    role = OTHER_ROLES
                total, count = self.roles.get(role, (0.0, 0))
                self.roles[role] = (finite(total + sequence.reward), count + 1)

    def summary(self) -> dict[str, float]:
        """Statistics as metrics; without ``rollout_reward_mean`` when no trajectory arrived."""
        values = {
            StepKey.ROLLOUTS_FINISHED.value: float(self.num_trajectories),
            StepKey.FAILURES.value: float(self.num_failures),
            StepKey.GROUPS_EQUAL_DROPPED.value: float(self.num_groups_equal),
            fates.StepFact.SEQUENCES_EXPIRED.value: float(self.num_expired),
            fates.StepFact.TOKENS_EXPIRED.value: float(self.num_tokens_expired),
            fates.StepFact.SLOTS_CANCELLED.value: float(self.num_cancelled),
            fates.StepFact.TIMEOUTS.value: float(self.num_timeouts),
            fates.StepFact.TRUNCATED_MASKED.value: float(self.num_truncated_masked),
            fates.StepFact.REWARDS_CLIPPED.value: float(self.num_clipped),
        }
        if self.num_transformed:
            values[StepKey.TRAINED_REWARD_MEAN.value] = self.trained_sum / self.num_transformed
        if self.num_trajectories:
            values[StepKey.ROLLOUT_REWARD_MEAN.value] = self.reward_sum / self.num_trajectories
        values |= {f"{ROLE_REWARD}{role}": total / count for role, (total, count) in self.roles.items()}
        if self.num_shaped:
            values[StepKey.OVERLONG_SHARE.value] = self.num_overlong / self.num_shaped
            values[StepKey.OVERLONG_PENALTY_MEAN.value] = self.penalty_sum / self.num_shaped
        return values


_OF_ROLLOUTS = (
    StepKey.ROLLOUTS_FINISHED, StepKey.FAILURES, StepKey.ROLLOUT_REWARD_MEAN, StepKey.GROUPS_EQUAL_DROPPED
)  # fmt: skip


def of_sources(statistics: Mapping[str, StepStatistics]) -> dict[str, float]:
    """The metrics of each source's rollouts; they have the names of those of all rollouts."""
    values: dict[str, float] = {}
    for source, found in statistics.items():
        summary = found.summary()
        values |= {source_key(source, key): summary[key] for key in _OF_ROLLOUTS if key in summary}
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
            StepKey.BATCH_REWARD_MEAN: finite_numbers.mean(entry.reward or 0.0 for entry, _ in rows),
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
    for position in sorted(range(len(num_tokens)), key=lambda p: (-num_tokens[p], p)):
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
    sequences: Mapping[str, Sequence]  # by sequence id
    replayed: bool  # recorded before this call

    def share(self, rank: int, num_ranks: int) -> RankBatch:
        """One rank's sequences of every minibatch, ordered by (minibatch, position)."""
        entries = self.record.entries
        chosen = rank_share([e.num_tokens for e in entries], [e.minibatch for e in entries], rank, num_ranks)
        ordered = sorted((entries[p] for p in chosen), key=lambda e: (e.minibatch, e.position))
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
) -> tuple[BatchRecord, dict[str, Sequence]]:
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
    totals = [[0, 0] for _ in range(num_minibatches)]
    trained = [member.sequence.num_trained_tokens for _, member, _ in flat]
    for count, minibatch in zip(trained, minibatch_of, strict=True):
        totals[minibatch][0] += 1
        totals[minibatch][1] += count
    of_sources = of_batch(fresh, {entry.sequence_id: entry for entry in entries if not entry.replayed})
    record = BatchRecord(
        policy=policy,
        training_step=training_step,
        entries=tuple(entries),
        minibatches=tuple(MinibatchTotals(num_sequences=n, num_trained_tokens=t) for n, t in totals),
        statistics={
            **statistics,
            **of_sources,
            **_statistics(entries, [member.sequence for _, member, _ in flat], sum(trained)),
        },
    )
    return record, {member.sequence_id: member.sequence for _, member, _ in flat}


def _statistics(entries: list[BatchEntry], sequences: list[Sequence], trained: int) -> dict[str, float]:
    """``trained``: tokens of the policy in all of them."""
    count = len(sequences)
    fresh = [e.staleness for e in entries if not e.replayed]
    again = [e.staleness for e in entries if e.replayed]
    masked = [e.num_masked_tokens for e in entries if e.num_masked_tokens and not e.replayed]
    replay = (
        {StepKey.NUM_REPLAYED.value: float(len(again)), StepKey.REPLAYED_STALENESS_MAX.value: float(max(again))}
        if again
        else {}
    )
    return {
        StepKey.BATCH_REWARD_MEAN.value: finite_numbers.mean(s.reward for s in sequences),
        StepKey.STALENESS_MEAN.value: sum(fresh) / len(fresh),
        StepKey.STALENESS_MAX.value: float(max(fresh)),
        StepKey.RESPONSE_TOKENS_MEAN.value: trained / count,
        StepKey.NUM_SEQUENCES.value: float(count),
        StepKey.NUM_TRAINED_TOKENS.value: float(trained),
        StepFact.SEQUENCES_MASKED.value: float(len(masked)),
        StepFact.TOKENS_MASKED.value: float(sum(masked)),
        **replay,
    }

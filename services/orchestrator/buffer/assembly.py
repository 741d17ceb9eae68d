"""From advantage groups to a recorded batch: minibatch, position and statistics of every sequence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.common import finite
from services.common.fates import StepFact
from services.common.types import MinibatchTotals, Sequence
from services.orchestrator.buffer.split import spread
from services.orchestrator.groups import AdvantageGroup
from services.orchestrator.journal.records import BatchEntry, BatchRecord


def assemble(
    policy: str,
    training_step: int,
    groups: Iterable[AdvantageGroup],
    num_minibatches: int,
    statistics: Mapping[str, float],
    replayed: Iterable[AdvantageGroup] = (),
) -> tuple[BatchRecord, dict[str, Sequence]]:
    """The batch of a training step, which starts from version ``training_step - 1``, and its sequences by id.

    ``groups`` are fresh, ``replayed`` ones were trained before. Staleness is told of each kind apart.
    """
    flat = [(group, member, False) for group in groups for member in group.members]
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
            )
        )
        positions[minibatch] += 1
    totals = [[0, 0] for _ in range(num_minibatches)]
    for (_, member, _), minibatch in zip(flat, minibatch_of, strict=True):
        totals[minibatch][0] += 1
        totals[minibatch][1] += member.sequence.num_trained_tokens
    record = BatchRecord(
        policy=policy,
        training_step=training_step,
        entries=tuple(entries),
        minibatches=tuple(MinibatchTotals(num_sequences=n, num_trained_tokens=t) for n, t in totals),
        statistics={**statistics, **_statistics(entries, [member.sequence for _, member, _ in flat])},
    )
    return record, {member.sequence_id: member.sequence for _, member, _ in flat}


def _statistics(entries: list[BatchEntry], sequences: list[Sequence]) -> dict[str, float]:
    count = len(sequences)
    trained = sum(s.num_trained_tokens for s in sequences)
    fresh = [e.staleness for e in entries if not e.replayed]
    again = [e.staleness for e in entries if e.replayed]
    masked = [e.num_masked_tokens for e in entries if e.num_masked_tokens and not e.replayed]
    replay = {"num_replayed": float(len(again)), "replayed_staleness_max": float(max(again))} if again else {}
    return {
        "batch_reward_mean": finite.mean(s.reward for s in sequences),
        "staleness_mean": sum(fresh) / len(fresh),
        "staleness_max": float(max(fresh)),
        "response_tokens_mean": trained / count,
        "num_sequences": float(count),
        "num_trained_tokens": float(trained),
        StepFact.SEQUENCES_MASKED.value: float(len(masked)),
        StepFact.TOKENS_MASKED.value: float(sum(masked)),
        **replay,
    }

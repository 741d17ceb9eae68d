"""Statistics of rollouts between two batches of a policy, over all of its tasks and by their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.common import finite as finite_numbers
from services.common.finite import finite
from services.common.records import fates
from services.common.records.types import Trajectory
from services.common.telemetry.metrics import ROLE_REWARD, SourceKey, StepKey, source_key
from services.orchestrator.buffer.rewards import is_timeout
from services.orchestrator.journal.records import BatchEntry
from services.orchestrator.state.groups import AdvantageGroup, Outcome

MOST_ROLES = 256  # names of roles are words of workflows: those beyond are told together
OTHER_ROLES = "other"


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
    SourceKey.ROLLOUTS_FINISHED, SourceKey.FAILURES, SourceKey.ROLLOUT_REWARD_MEAN, SourceKey.GROUPS_EQUAL_DROPPED
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
            SourceKey.BATCH_REWARD_MEAN: finite_numbers.mean(entry.reward or 0.0 for entry, _ in rows),
            SourceKey.RESPONSE_TOKENS_MEAN: sum(tokens for _, tokens in rows) / len(rows),
            SourceKey.STALENESS_MEAN: sum(staleness) / len(staleness),
            SourceKey.STALENESS_MAX: float(max(staleness)),
        }
        values |= {source_key(source, key): value for key, value in found.items()}
    return values

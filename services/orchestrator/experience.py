"""What resolved slots become: statistics, filtered advantage groups, one buffer and one quota account per policy.

    slot resolved -> quota
    last slot -> advantage groups -> dynamic sampling -> resampling -> shaping, statistics -> buffer -> batch
              -> version published

The same methods serve live operation and recovery, in journal order, so a restarted orchestrator holds what the earlier
one held. Knows nothing about replicas, grpc, or how records became durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.common import fates
from services.common.config.policy import BatchConfig, OverlongPenaltyConfig
from services.common.finite import finite
from services.common.types import Trajectory
from services.orchestrator.admission import Admission, Limits
from services.orchestrator.buffer.experience import ExperienceBuffer
from services.orchestrator.buffer.late import LateRule
from services.orchestrator.buffer.replay import ReplayStore
from services.orchestrator.buffer.resample import resample_group
from services.orchestrator.buffer.shaping import shape_group
from services.orchestrator.groups import AdvantageGroup, Member, Outcome, TaskGroup, dynamic_sampling
from services.orchestrator.journal.records import BatchRecord, Verdict
from services.orchestrator.members import member_fates
from services.orchestrator.rewards import RewardRules, is_timeout, without_masked
from services.orchestrator.unfinished import UnfinishedGroups

MOST_ROLES = 256  # names of roles are words of workflows: those beyond are told together
OTHER_ROLES = "other"


@dataclass(slots=True)
class StepStatistics:
    """What happened since the previous batch of a policy was assembled."""

    reward_sum: float = 0.0
    num_trajectories: int = 0
    num_failures: int = 0
    num_groups_equal: int = 0
    num_expired: int = 0
    num_tokens_expired: int = 0
    num_cancelled: int = 0
    roles: dict[str, tuple[float, int]] = field(default_factory=dict)  # "role/attempt" -> rewards, sequences
    num_shaped: int = 0  # sequences whose length was judged
    num_overlong: int = 0
    penalty_sum: float = 0.0
    num_timeouts: int = 0  # of the failures
    num_truncated_masked: int = 0
    num_clipped: int = 0
    trained_sum: float = 0.0  # of the transformed rewards of complete groups, whatever becomes of them
    num_transformed: int = 0

    def note_roles(self, policy: str, trajectory: Trajectory) -> None:
        for sequence in trajectory.sequences:
            if sequence.policy == policy:
                role = f"{sequence.role}/{sequence.attempt}"
                if role not in self.roles and len(self.roles) >= MOST_ROLES:
                    role = OTHER_ROLES
                total, count = self.roles.get(role, (0.0, 0))
                self.roles[role] = (finite(total + sequence.reward), count + 1)

    def summary(self) -> dict[str, float]:
        """Without ``rollout_reward_mean`` when no trajectory came in since."""
        values = {
            "rollouts_finished": float(self.num_trajectories),
            "failures": float(self.num_failures),
            "groups_equal_dropped": float(self.num_groups_equal),
            fates.StepFact.SEQUENCES_EXPIRED.value: float(self.num_expired),
            fates.StepFact.TOKENS_EXPIRED.value: float(self.num_tokens_expired),
            fates.StepFact.SLOTS_CANCELLED.value: float(self.num_cancelled),
            fates.StepFact.TIMEOUTS.value: float(self.num_timeouts),
            fates.StepFact.TRUNCATED_MASKED.value: float(self.num_truncated_masked),
            fates.StepFact.REWARDS_CLIPPED.value: float(self.num_clipped),
        }
        if self.num_transformed:
            values["trained_reward_mean"] = self.trained_sum / self.num_transformed
        if self.num_trajectories:
            values["rollout_reward_mean"] = self.reward_sum / self.num_trajectories
        values |= {f"rollout_reward/{role}": total / count for role, (total, count) in self.roles.items()}
        if self.num_shaped:
            values["overlong_share"] = self.num_overlong / self.num_shaped
            values["overlong_penalty_mean"] = self.penalty_sum / self.num_shaped
        return values


class Experience:
    def __init__(
        self,
        policies: Mapping[str, BatchConfig],
        num_steps: int,
        counters: Counter[str],
        on_closed: Callable[[str, fates.ClosedReason], None] = lambda group_id, reason: None,
        admit: Literal["all", "any"] = "all",
        rules: RewardRules | None = None,
        seed: int = 0,
        on_judged: Callable[[str, list[Verdict]], None] = lambda group_id, verdicts: None,
        deterministic: bool = False,
    ) -> None:
        """``on_closed`` is told (task group, reason) when nothing more will come of a training group, ``on_judged`` what
        became of its advantage groups when it is complete, ahead of that. ``seed``: of the run. ``deterministic``: what is in
        a batch, and in which order, does not depend on when rollouts end."""
        self._rules = rules or RewardRules(group_by={name: batch.group_by for name, batch in policies.items()})
        self._policies = policies
        self._seed = seed
        self._counters = counters
        self._on_closed = on_closed
        self._on_judged = on_judged
        self.buffers = {
            name: ExperienceBuffer(batch.fresh_size, LateRule.of(batch), "issued" if deterministic else batch.order)
            for name, batch in policies.items()
        }
        self.admission = Admission(
            {
                name: Limits(
                    batch_size=batch.fresh_size,
                    max_staleness=batch.max_staleness,
                    num_steps=num_steps,
                    counts_unfinished=batch.late in ("mask", "drop"),
                    exact=deterministic,
                )
                for name, batch in policies.items()
            },
            admit,
        )
        self.replay = {name: ReplayStore(name, batch.replay, seed) for name, batch in policies.items()}
        self._fresh: dict[tuple[str, int], list[AdvantageGroup]] = {}  # of batches in training, where they are replayed
        self._since_batch = {name: StepStatistics() for name in policies}
        self._in_training: dict[tuple[str, int], int] = {}  # (policy, step) -> sequences the trainer holds
        self.num_kept: Counter[str] = Counter()  # sequences that were kept for training, by policy
        self.num_filtered_in_a_row: Counter[str] = Counter()  # dropped for equal rewards since one was kept
        self._buffered: Counter[str] = Counter()  # task group -> advantage groups in buffers
        self.unfinished = UnfinishedGroups()
        # In a recovery: judged task groups -> which (policy, role, attempt) of them the earlier process had no use for.
        self.surplus_before: Mapping[str, set[tuple[str, str, int]]] = {}

    def policies_of(self, group: TaskGroup) -> tuple[str, ...]:
        """The policies that a task group may bring sequences to train for."""
        named = group.order.policies
        return tuple(policy for policy in self._policies if not named or policy in named)

    def issued(self, group: TaskGroup) -> None:
        """A training group was issued; ``group.born`` says on which versions its slots begin."""
        self.unfinished.add(group)
        self.admission.issued(len(group.unresolved), self.policies_of(group))

    def reissued(self, group: TaskGroup, born: Mapping[str, int]) -> None:
        """The open slots of a training group begin again, on these versions."""
        self.unfinished.remove(group)
        group.born = dict(born)
        self.unfinished.add(group)

    def due(self, policy: str) -> list[TaskGroup]:
        """Unfinished groups whose open slots began on a version that the policy's next step is the last to train."""
        return self.unfinished.begun_before(policy, self._oldest_allowed(policy) + 1)

    def is_due_everywhere(self, group: TaskGroup) -> bool:
        """The same for every policy of the group that has steps left and a trainer, where all of these drop late tokens:
        with another ``batch.late`` a policy can still train what its open slots bring."""
        return all(
            self._policies[policy].late == "drop"
            and group.born.get(policy, self._oldest_allowed(policy) + 1) <= self._oldest_allowed(policy)
            for policy in self.policies_of(group)
            if self.admission.accounts[policy].steps_left > 0 and policy not in self.admission.absent
        )

    def _oldest_allowed(self, policy: str) -> int:
        return self.buffers[policy].version - self._policies[policy].max_staleness

    def cancelled(self, group: TaskGroup) -> None:
        """Nothing more is wanted of a training group that is still running."""
        self.unfinished.remove(group)
        self.admission.given_up(len(group.unresolved), self.policies_of(group))
        self.admission.ended(len(group.order.indices), self.policies_of(group))
        for policy, count in self._sequences_per_policy(group.trajectories).items():
            self.admission.finished(policy, count)
            self.admission.returned(policy, count)

    def resolved(self, group: TaskGroup, outcome: Outcome) -> list[Verdict]:
        """A slot of a training group got its outcome (already kept in the group). The last slot brings what becomes of
        the advantage groups."""
        policies = self.policies_of(group)
        if isinstance(outcome, Trajectory):
            self.admission.resolved(self._sequences_per_policy([outcome]), policies)
        else:
            self.admission.given_up(1, policies)
        for policy in policies:
            statistics = self._since_batch[policy]
            if isinstance(outcome, Trajectory):
                statistics.note_roles(policy, outcome)
                statistics.reward_sum = finite(statistics.reward_sum + outcome.reward)
                statistics.num_trajectories += 1
            elif outcome.reason == fates.TOO_OLD:
                statistics.num_cancelled += 1
            else:
                statistics.num_failures += 1
                statistics.num_timeouts += is_timeout(outcome)
        return self._completed(group) if group.complete else []

    def _completed(self, group: TaskGroup) -> list[Verdict]:
        self.unfinished.remove(group)
        self.admission.ended(len(group.order.indices), self.policies_of(group))
        for policy, count in self._sequences_per_policy(group.trajectories).items():
            self.admission.finished(policy, count)
        verdicts = [
            self._take_in(found, group.order.seed)
            for found in self._rules.groups(group)
            if found.policy in self._policies
        ]
        if verdicts:
            self._on_judged(group.id, verdicts)
        if not self._buffered[group.id]:
            del self._buffered[group.id]
            self._on_closed(group.id, fates.ClosedReason.NOTHING_TO_TRAIN)
        return verdicts

    def _take_in(self, group: AdvantageGroup, seed: int) -> Verdict:
        outcome, kept, num_expired = self._judge(group, seed)
        return Verdict(
            policy=group.policy,
            role=group.role,
            attempt=group.attempt,
            num_sequences=group.size,
            num_kept=kept.size if kept else 0,
            mean=kept.mean if kept else group.mean,
            std=kept.std if kept else group.std,
            outcome=outcome,
            members=member_fates(group, kept, outcome, self._policies[group.policy].resample, seed),
            num_expired=num_expired,
        )

    def _judge(self, group: AdvantageGroup, seed: int) -> tuple[fates.GroupFate, AdvantageGroup | None, int]:
        """Put a complete advantage group into its buffer, or say why not; what is in the buffer of it, and how many of its
        members are too old. ``seed``: of its task group."""
        policy = group.policy
        config = self._policies[policy]
        judged, num_clipped = self._rules.transformed(group)  # a clip can make rewards equal, and never unequal
        self._note_rewards(judged, num_clipped)
        _, dropped = dynamic_sampling([judged], config.dynamic_sampling)
        if dropped:
            self._since_batch[policy].num_groups_equal += 1
            self.num_filtered_in_a_row[policy] += group.size
            self._drop(group, "sequences_filtered_equal_rewards")
            return fates.GroupFate.EQUAL_REWARDS, None, 0
        if config.resample is not None:
            kept = resample_group(group, config.resample, seed)
            left_out = group.size - (kept.size if kept else 0)
            self.admission.returned(policy, left_out)
            self._counters["sequences_resampled_away"] += left_out
            if kept is None:
                self._since_batch[policy].num_groups_equal += 1
                return fates.GroupFate.RESAMPLED_AWAY, None, 0
            group = kept
        if config.overlong_penalty is not None:
            group = self._shaped(group, config.overlong_penalty)
        trained = without_masked(self._rules.transformed(group)[0])
        num_masked = group.size - (trained.size if trained else 0)
        self._since_batch[policy].num_truncated_masked += num_masked
        self.admission.returned(policy, num_masked)
        self._counters[fates.StepFact.TRUNCATED_MASKED.value] += num_masked
        if trained is None:
            return fates.GroupFate.TRUNCATED, None, 0
        group = trained
        if self._is_surplus(group):
            self._drop(group, "sequences_surplus")
            return fates.GroupFate.SURPLUS, None, 0
        kept, old = self.buffers[policy].add(group)
        self._expire(policy, old)
        if kept is None:
            return fates.GroupFate.EXPIRED, None, len(old)
        self._buffered[group.task_group_id] += 1
        self.num_kept[policy] += kept.size
        self.num_filtered_in_a_row[policy] = 0
        return fates.GroupFate.KEPT, kept, len(old)

    def _is_surplus(self, group: AdvantageGroup) -> bool:
        """Said once: a recovery does not know who was absent, nor of what closed task groups had outstanding then."""
        before = self.surplus_before.get(group.task_group_id)
        if before is not None:
            return (group.policy, group.role, group.attempt) in before
        return self.admission.is_surplus(group.policy, group.size)

    def _expire(self, policy: str, members: list[Member]) -> None:
        """Nothing of these members may be trained any more."""
        num_tokens = sum(member.sequence.num_trained_tokens for member in members)
        self._since_batch[policy].num_expired += len(members)
        self._since_batch[policy].num_tokens_expired += num_tokens
        self._counters["sequences_expired"] += len(members)
        self._counters["tokens_expired"] += num_tokens
        self.admission.returned(policy, len(members))

    def _note_rewards(self, judged: AdvantageGroup, num_clipped: int) -> None:
        since = self._since_batch[judged.policy]
        since.num_clipped += num_clipped
        since.trained_sum = finite(since.trained_sum + judged.mean * judged.num_compared)
        since.num_transformed += judged.num_compared
        self._counters[fates.StepFact.REWARDS_CLIPPED.value] += num_clipped

    def _shaped(self, group: AdvantageGroup, config: OverlongPenaltyConfig) -> AdvantageGroup:
        shaped, penalties = shape_group(group, config)
        since = self._since_batch[group.policy]
        since.num_shaped += len(penalties)
        since.num_overlong += sum(penalty > 0 for penalty in penalties)
        since.penalty_sum += sum(penalties)
        return shaped

    def _drop(self, group: AdvantageGroup, counter: str) -> None:
        self.admission.returned(group.policy, group.size)
        self._counters[counter] += group.size

    def buffered_groups(self) -> set[str]:
        """Task groups with sequences that wait for a batch, or may be in another one."""
        replayable = (group.task_group_id for store in self.replay.values() for group in store.groups)
        return set(self._buffered) | set(replayable)

    def take_batch(self, policy: str, training_step: int) -> tuple[list[AdvantageGroup], dict[str, float]]:
        """Groups for a batch that can be taken, and what happened since the one before."""
        groups = self.buffers[policy].take()
        statistics = self._since_batch[policy].summary()
        self._since_batch[policy] = StepStatistics()
        self._given_to_trainer(policy, training_step, sum(group.size for group in groups))
        if self.replay[policy].enabled:
            self._fresh[policy, training_step] = groups
        return groups, statistics

    def _given_to_trainer(self, policy: str, training_step: int, num_sequences: int) -> None:
        self._in_training[policy, training_step] = num_sequences
        self.admission.taken(policy, num_sequences)

    def draw_replayed(self, policy: str, training_step: int, num_fresh: int) -> list[AdvantageGroup]:
        """Trained groups that fill a batch of so many fresh sequences up, as far as any are young enough."""
        if not self.replay[policy].enabled:
            return []
        drawn = self.replay[policy].draw(training_step, self._policies[policy].size - num_fresh)
        self._counters["sequences_replayed"] += sum(group.size for group in drawn)
        return drawn

    def refill_replay(self, policy: str, first_step: int, fresh: Iterable[list[AdvantageGroup]]) -> None:
        """What an earlier process trained for the first time in the steps from ``first_step`` on, lived through again."""
        version = self.replay[policy].version
        self.replay[policy] = ReplayStore(policy, self._policies[policy].replay, self._seed)
        for training_step, groups in enumerate(fresh, start=first_step):
            if training_step <= version:
                self.replay[policy].trained(groups, training_step)
            else:
                self._fresh[policy, training_step] = groups

    def batch_recorded(self, groups: Iterable[AdvantageGroup]) -> None:
        """A batch of these groups is durable."""
        for group in groups:
            self._left_buffer(group, fates.ClosedReason.TRAINED)

    def recover_batch(self, record: BatchRecord) -> None:
        """A batch was recorded by an earlier process: its sequences are no longer for anybody else."""
        policy = record.policy
        fresh = [entry for entry in record.entries if not entry.replayed]
        groups = self.buffers[policy].take_named({entry.sequence_id for entry in fresh})
        self._since_batch[policy] = StepStatistics()
        missing = len(fresh) - sum(group.size for group in groups)  # of task groups closed long ago
        self.admission.accounts[policy].accepted += missing
        self._given_to_trainer(policy, record.training_step, len(fresh))
        self.batch_recorded(groups)

    def note_lost(self, num_sequences: int) -> None:
        """Sequences of a recorded batch cannot be read any more: it is served without them."""
        self._counters["sequences_lost"] += num_sequences

    def lose_batch(self, policy: str, named: Collection[str]) -> None:
        """The record of a batch is lost. What waits now, and is not ``named`` by a later one, may have been in it: it is
        trained by no other, lest it be trained twice."""
        self._since_batch[policy] = StepStatistics()
        for group in self.buffers[policy].take_unnamed(named):
            self._drop(group, "sequences_set_aside")
            self._left_buffer(group, fates.ClosedReason.SET_ASIDE)

    def advanced(self, policy: str, version: int) -> None:
        """A version was published: its batch is trained, and what is now too old leaves."""
        self.admission.advanced(policy, version)
        for key in [k for k in self._in_training if k[0] == policy and k[1] <= version]:
            self.admission.trained(policy, self._in_training.pop(key))
        self.replay[policy].trained(self._fresh.pop((policy, version), []), version)
        for group, old in self.buffers[policy].advance(version):
            self._expire(policy, old)
            if len(old) == group.size:
                self._left_buffer(group, fates.ClosedReason.EXPIRED)

    def _left_buffer(self, group: AdvantageGroup, reason: fates.ClosedReason) -> None:
        name = group.task_group_id
        self._buffered[name] -= 1
        if self._buffered[name] <= 0:
            del self._buffered[name]
            self._on_closed(name, reason)

    def _sequences_per_policy(self, trajectories: Iterable[Trajectory]) -> Counter[str]:
        """Of the policies that are trained."""
        played = (sequence.policy for trajectory in trajectories for sequence in trajectory.sequences)
        return Counter(policy for policy in played if policy in self._policies)

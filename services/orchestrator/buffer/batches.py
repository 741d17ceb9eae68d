"""From resolved slots to batches that are recorded once and served to any rank.

    slot resolved -> quota
    last slot -> advantage groups -> dynamic sampling -> resampling -> shaping, statistics -> buffer
    ranks -> get(step) -> [recorded? memory, else journal] or [wait for the buffer -> assemble -> record] -> Batch

``ExperiencePipeline`` has one buffer and quota account per policy. Live operation and recovery call the same methods in
journal order, so a restarted orchestrator has the same state as the earlier one.

Invariant of ``Batches``: a batch is served only after its ordered ids are durable. So every later call, with any number
of ranks and after any crash, returns the same batch. Independent of replicas, grpc and trainers' leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import structlog

from services.common import records as fates
from services.common.aio import called, deadline
from services.common.config.data import SourceConfig
from services.common.config.training import BatchConfig
from services.common.errors import (
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
)
from services.common.records import StepFact, Trajectory
from services.common.telemetry.metrics import StepKey, source_key
from services.orchestrator.admission import Account, Admission, Mixture
from services.orchestrator.buffer.assembly import (
    MOST_AT_ONCE,
    Batch,
    StepStatistics,
    assemble,
    read_what_is_left,
)
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    ExperienceBuffer,
    LateRule,
    Member,
    ReplayStore,
    RewardRules,
    resample_group,
    shape_group,
    without_masked,
)
from services.orchestrator.groups import Outcome, TaskGroup, split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import BatchRecord, GroupVerdict, MemberFate
from services.orchestrator.journal.journal import Journal

log = structlog.get_logger()

_OF_ROLLOUTS = (
    StepKey.ROLLOUTS_FINISHED, StepKey.FAILURES, StepKey.ROLLOUT_REWARD_MEAN, StepKey.GROUPS_EQUAL_DROPPED
)  # fmt: skip
_NOTHING_LEARNT = {fates.GroupFate.EQUAL_REWARDS, fates.GroupFate.RESAMPLED_AWAY, fates.GroupFate.TRUNCATED}


class ExperiencePipeline:
    def __init__(
        self,
        policies: Mapping[str, BatchConfig],
        num_steps: int,
        counters: Counter[str],
        *,
        admit: Literal["all", "any"] = "all",
        deterministic: bool = False,
        on_closed: Callable[[str, fates.ClosedReason], None] = lambda group_id, reason: None,
        on_judged: Callable[[str, list[GroupVerdict]], None] = lambda group_id, verdicts: None,
        rules: RewardRules | None = None,
        seed: int = 0,
        sources: Mapping[str, SourceConfig] = MappingProxyType({}),
    ) -> None:
        """``sources``: of a mixture, by name; without one, tasks come from one dataset. ``on_closed`` receives (task group,
        reason) when a training group ends, ``on_judged`` the fates of its advantage groups before that. ``seed``: of the
        run. ``deterministic``: contents and order of a batch do not depend on the time at which rollouts end."""
        self._rules = rules or RewardRules(group_by={name: batch.group_by for name, batch in policies.items()})
        self._policies = policies
        self._seed = seed
        self.counters = counters
        self._on_closed = on_closed
        self._on_judged = on_judged
        self._sources = sources
        self.issuable: Callable[[str], bool] = lambda policy: self.admission.accounts[policy].has_room()
        """Whether another task group for a policy may be issued now."""
        weights = {name: source.weight for name, source in sources.items()} or {"": 1.0}
        self.mixtures = {policy: Mixture(weights) for policy in policies}
        self.buffers = {
            name: ExperienceBuffer(
                batch.fresh_size, LateRule.of(batch), "issued" if deterministic else batch.order, self.mixtures[name],
                partial(self._may_come, name),
            )
            for name, batch in policies.items()
        }  # fmt: skip
        self.admission = Admission(
            {
                name: Account(
                    batch_size=batch.fresh_size,
                    max_staleness=batch.max_staleness,
                    num_steps=num_steps,
                    counts_unfinished=batch.late_rule in ("mask", "drop"),
                    exact=deterministic,
                )
                for name, batch in policies.items()
            },
            admit,
        )
        self.replay = {
            name: ReplayStore(name, batch.replay, seed) for name, batch in policies.items() if batch.replay.ratio > 0
        }  # of policies with a replay
        self._fresh: dict[tuple[str, int], list[AdvantageGroup]] = {}  # of batches in training, where they are replayed
        self._since_batch = {name: StepStatistics() for name in policies}
        self._of_sources = {(name, source): StepStatistics() for name in policies for source in sources}
        self._in_training: dict[tuple[str, int], int] = {}  # (policy, step) -> sequences the trainer holds
        self.num_kept: Counter[str] = Counter()  # sequences that were kept for training, by policy
        self.num_filtered: Counter[str] = Counter()  # dropped for equal rewards
        self.num_filtered_in_a_row: Counter[str] = Counter()  # dropped for equal rewards since one was kept
        self._buffered: Counter[str] = Counter()  # task group -> advantage groups in buffers
        self.unfinished: dict[str, TaskGroup] = {}
        # In a recovery: judged task groups -> which (policy, role, attempt) of them the earlier process had no use for.
        self.surplus_before: Mapping[str, set[tuple[str, str, int]]] = {}

    def policies_of(self, group: TaskGroup) -> tuple[str, ...]:
        """The trained policies that a task group may have sequences for."""
        named = group.order.policies
        return tuple(policy for policy in self._policies if not named or policy in named)

    def next_source(self, policies: Iterable[str]) -> str:
        """The source of the next task group for these policies: the one that is furthest behind its share."""
        if not self._sources:
            return ""
        trained = [policy for policy in policies if self.admission.accounts[policy].steps_left > 0]

        def level(source: str) -> float:
            return sum(
                self.mixtures[policy].level(
                    source, self.buffers[policy].num_of_source[source] + self.mixtures[policy].expected(source)
                )
                for policy in trained
            )

        return min(self._sources, key=level)

    def _may_come(self, policy: str, source: str) -> bool:
        """Whether a group of the source may come before a batch of the policy is taken."""
        return self.mixtures[policy].is_running(source) or self.issuable(policy)

    def issued(self, group: TaskGroup) -> None:
        """Count an issued training group; ``group.born`` has the start versions of its slots."""
        self.unfinished[group.id] = group
        for policy in self.policies_of(group):
            account = self.admission.accounts[policy]
            account.running_slots += len(group.unresolved)
            account.group_slots += len(group.order.indices)
            self.mixtures[policy].issued(group.order.source, len(group.order.indices))

    def due(self, policy: str) -> list[TaskGroup]:
        """Unfinished groups whose open slots began on a version that only the policy's next step can train."""
        oldest = self.buffers[policy].version - self._policies[policy].max_staleness
        due = [group for group in self.unfinished.values() if group.born.get(policy, oldest + 1) <= oldest]
        return sorted(due, key=lambda group: group.born[policy])

    def is_due_everywhere(self, group: TaskGroup) -> bool:
        """The same for every policy of the group with remaining steps and a trainer, if all of these drop late tokens:
        with another ``batch.late`` a policy can still train the results of its open slots."""
        return all(
            self._policies[policy].late_rule == "drop" and group in self.due(policy)
            for policy in self.policies_of(group)
            if self.admission.accounts[policy].steps_left > 0 and policy not in self.admission.absent
        )

    def cancelled(self, group: TaskGroup) -> None:
        """Cancel a running training group."""
        for policy in self.policies_of(group):
            self.admission.accounts[policy].running_slots -= len(group.unresolved)
        self._end(group, is_complete=False)

    def _end(self, group: TaskGroup, is_complete: bool) -> None:
        """Return the slots of a complete or cancelled training group."""
        self.unfinished.pop(group.id, None)
        num_slots, found_of = len(group.order.indices), self._sequences_per_policy(group.trajectories)
        for policy in self.policies_of(group):
            account, count = self.admission.accounts[policy], found_of.get(policy, 0)
            account.group_slots -= num_slots
            account.unfinished -= count
            assert account.group_slots >= 0 and account.unfinished >= 0 and account.running_slots >= 0
            self.mixtures[policy].ended(group.order.source, num_slots, count if is_complete else None)

    def resolved(self, group: TaskGroup, outcome: Outcome) -> list[GroupVerdict]:
        """Handle the outcome of a slot of a training group (the group holds the outcome). The last slot judges the
        advantage groups."""
        found_of = self._sequences_per_policy([outcome]) if isinstance(outcome, Trajectory) else None
        for policy in self.policies_of(group):
            account = self.admission.accounts[policy]
            account.running_slots -= 1
            if found_of is not None:
                count = found_of.get(policy, 0)
                account.unfinished += count
                account.num_trajectories += 1
                account.num_sequences += count
            for statistics in self._statistics(policy, group.order.source):
                statistics.note(policy, outcome)
        return self._completed(group) if group.complete else []

    def _statistics(self, policy: str, source: str) -> list[StepStatistics]:
        """Those of the policy, and those of the source where there are several."""
        own = self._of_sources.get((policy, source))
        return [self._since_batch[policy], *([] if own is None else [own])]

    def _completed(self, group: TaskGroup) -> list[GroupVerdict]:
        self._end(group, is_complete=True)
        source = group.order.source
        verdicts = [
            self._take_in(found, group.order.seed)
            for found in self._rules.groups(group)
            if found.policy in self._policies
        ]
        for policy in self.policies_of(group):
            # Whether the task group has anything that the policy can train, now or if it were in time.
            mixture = self.mixtures[policy]
            if not {verdict.outcome for verdict in verdicts if verdict.policy == policy} <= _NOTHING_LEARNT:
                mixture.kept(source)
            elif mixture.dropped(source, len(group.order.indices)) and mixture.is_mixed:
                log.warning(
                    "source.exhausted", policy=policy, source=source, task_groups=mixture.exhausted[source],
                    effect="batches no longer wait for it",
                )  # fmt: skip
        if verdicts:
            self._on_judged(group.id, verdicts)
        if not self._buffered[group.id]:
            del self._buffered[group.id]
            self._on_closed(group.id, fates.ClosedReason.NOTHING_TO_TRAIN)
        return verdicts

    def _take_in(self, group: AdvantageGroup, seed: int) -> GroupVerdict:
        """Put a complete advantage group into its buffer, or drop the group. ``seed``: of its task group."""
        scaled = self._sources.get(group.source)
        if scaled is not None and scaled.advantage_scale != 1.0:
            group = replace(group, advantage_scale=scaled.advantage_scale)
        policy, whole = group.policy, group
        config, since = self._policies[policy], self._since_batch[policy]
        fate_of: dict[str, fates.GroupFate] = {}  # of members with another one than the group

        def leave_out(kept: Iterable[Member], fate: fates.GroupFate) -> int:
            left = {m.sequence_id for m in group.members} - {m.sequence_id for m in kept}
            fate_of.update(dict.fromkeys(left, fate))
            return len(left)

        def verdict(outcome: fates.GroupFate, kept: AdvantageGroup | None = None, num_expired: int = 0) -> GroupVerdict:
            return GroupVerdict(
                policy=policy, role=whole.role, attempt=whole.attempt, num_sequences=whole.size,
                num_kept=kept.size if kept else 0, mean=(kept or whole).mean, std=(kept or whole).std,
                outcome=outcome, num_expired=num_expired,
                members=tuple(
                    MemberFate(
                        index=split_sequence_id(m.sequence_id)[1], position=split_sequence_id(m.sequence_id)[2],
                        num_tokens=m.sequence.num_trained_tokens, fate=fate_of.get(m.sequence_id, outcome),
                    )
                    for m in whole.members
                ),
            )  # fmt: skip

        judged, num_clipped = self._rules.transformed(group)  # a clip can make rewards equal, and never unequal
        self._count(policy, StepFact.REWARDS_CLIPPED, num_clipped)
        since.trained_sum += judged.mean * judged.num_compared
        since.num_transformed += judged.num_compared
        if config.dynamic_sampling and judged.rewards_equal:  # they carry no gradient
            for statistics in self._statistics(policy, group.source):
                statistics.counts[StepKey.GROUPS_EQUAL_DROPPED] += 1
            self.num_filtered[policy] += group.size
            self.num_filtered_in_a_row[policy] += group.size
            self.counters[fates.RunCount.SEQUENCES_EQUAL_REWARDS.value] += group.size
            return verdict(fates.GroupFate.EQUAL_REWARDS)
        if config.resample is not None:
            kept = resample_group(group, config.resample, seed)
            left_out = leave_out(kept.members if kept else (), fates.GroupFate.RESAMPLED_AWAY)
            self.counters[fates.RunCount.SEQUENCES_RESAMPLED_AWAY.value] += left_out
            if kept is None:
                since.counts[StepKey.GROUPS_EQUAL_DROPPED] += 1
                return verdict(fates.GroupFate.RESAMPLED_AWAY)
            group = kept
        if config.overlong_penalty is not None:
            group, penalties = shape_group(group, config.overlong_penalty)
            since.num_shaped += len(penalties)
            since.num_overlong += sum(penalty > 0 for penalty in penalties)
            since.penalty_sum += sum(penalties)
        trained = without_masked(self._rules.transformed(group)[0])
        num_masked = leave_out(trained.members if trained else (), fates.GroupFate.TRUNCATED)
        self._count(policy, StepFact.TRUNCATED_MASKED, num_masked)
        if trained is None:
            return verdict(fates.GroupFate.TRUNCATED)
        group = trained
        # The verdict keeps whether a batch had room: a recovery does not know which trainers were absent, nor the
        # outstanding slots of closed task groups.
        before = self.surplus_before.get(group.task_group_id)
        is_surplus = (
            self.admission.is_surplus(policy) if before is None else (policy, whole.role, whole.attempt) in before
        )
        if is_surplus:
            self.counters[fates.RunCount.SEQUENCES_SURPLUS.value] += group.size
            return verdict(fates.GroupFate.SURPLUS)
        kept, old = self.buffers[policy].add(group)
        self._recount(policy)
        self._expire(policy, old)
        if kept is None:
            return verdict(fates.GroupFate.EXPIRED, num_expired=len(old))
        leave_out(kept.members, fates.GroupFate.EXPIRED)
        self._buffered[group.task_group_id] += 1
        self.num_kept[policy] += kept.size
        self.counters[fates.RunCount.SEQUENCES_KEPT.value] += kept.size
        self.num_filtered_in_a_row[policy] = 0
        return verdict(fates.GroupFate.KEPT, kept, len(old))

    def _expire(self, policy: str, members: list[Member]) -> None:
        """Count members that are too old to be trained."""
        self._count(policy, StepFact.SEQUENCES_EXPIRED, len(members))
        self._count(policy, StepFact.TOKENS_EXPIRED, sum(member.sequence.num_trained_tokens for member in members))

    def _count(self, policy: str, fact: StepFact, number: int) -> None:
        """Add to the statistics of the policy's step and to the counters of the run."""
        self._since_batch[policy].counts[fact] += number
        self.counters[fact.value] += number

    def buffered_groups(self) -> set[str]:
        """Task groups with sequences that wait for a batch, or may be in another one."""
        replayable = (group.task_group_id for store in self.replay.values() for group in store.groups)
        return set(self._buffered) | set(replayable)

    def take_batch(self, policy: str, training_step: int) -> tuple[list[AdvantageGroup], dict[str, float]]:
        """Groups for the next batch, and the statistics since the previous batch."""
        groups, shares = self.buffers[policy].take()
        statistics = self._since_batch[policy].summary() | shares
        for source in self._sources:  # the rollouts of each, under the names of those of all rollouts
            summary = self._of_sources[policy, source].summary()
            statistics |= {source_key(source, key): summary[key] for key in _OF_ROLLOUTS if key in summary}
        self._begin_statistics(policy)
        self._in_training[policy, training_step] = sum(group.size for group in groups)
        self._recount(policy)
        if policy in self.replay:
            self._fresh[policy, training_step] = groups
        return groups, statistics

    def _begin_statistics(self, policy: str) -> None:
        self._since_batch[policy] = StepStatistics()
        for source in self._sources:
            self._of_sources[policy, source] = StepStatistics()

    def _recount(self, policy: str) -> None:
        """Note the sequences that wait for a batch, and those that the trainer holds, after a change."""
        account = self.admission.accounts[policy]
        account.buffered = self.buffers[policy].num_of_source.total()
        account.in_training = sum(number for (name, _), number in self._in_training.items() if name == policy)

    def draw_replayed(self, policy: str, training_step: int, num_fresh: int) -> list[AdvantageGroup]:
        """Trained groups that fill up a batch with this many fresh sequences, as far as young enough groups exist."""
        drawn = self.replay[policy].draw(training_step, self._policies[policy].size - num_fresh)
        self.counters[fates.RunCount.SEQUENCES_REPLAYED.value] += sum(group.size for group in drawn)
        return drawn

    def refill_replay(self, policy: str, first_step: int, fresh: Iterable[list[AdvantageGroup]]) -> None:
        """Refill the replay store with the groups that an earlier process trained first in the steps from
        ``first_step`` on."""
        version = self.replay[policy].version
        self.replay[policy] = ReplayStore(policy, self._policies[policy].replay, self._seed)
        for training_step, groups in enumerate(fresh, start=first_step):
            if training_step <= version:
                self.replay[policy].trained(groups, training_step)
            else:
                self._fresh[policy, training_step] = groups

    def batch_recorded(self, groups: Iterable[AdvantageGroup]) -> None:
        """Note that a batch of these groups is durable."""
        for group in groups:
            self._left_buffer(group, fates.ClosedReason.TRAINED)

    def recover_batch(self, record: BatchRecord) -> None:
        """Apply a batch that an earlier process recorded: its sequences leave the buffer."""
        policy = record.policy
        fresh = [entry for entry in record.entries if not entry.replayed]
        groups = self.buffers[policy].take_named({entry.sequence_id for entry in fresh})
        self._begin_statistics(policy)
        self._in_training[policy, record.training_step] = len(fresh)
        self._recount(policy)
        self.batch_recorded(groups)

    def lose_batch(self, policy: str, named: Collection[str]) -> None:
        """Handle the lost record of a batch: drop the waiting groups that no later batch names, as they may have been
        in the lost batch and must not be trained twice."""
        self._begin_statistics(policy)
        groups = self.buffers[policy].take_named(named, named=False)
        self._recount(policy)
        for group in groups:
            self.counters[fates.RunCount.SEQUENCES_SET_ASIDE.value] += group.size
            self._left_buffer(group, fates.ClosedReason.SET_ASIDE)

    def advanced(self, policy: str, version: int) -> None:
        """Handle a published version: its batch is trained, and groups that are too old leave."""
        self.admission.accounts[policy].version = version
        for key in [k for k in self._in_training if k[0] == policy and k[1] <= version]:
            del self._in_training[key]
        if policy in self.replay:
            self.replay[policy].trained(self._fresh.pop((policy, version), []), version)
        expired = self.buffers[policy].advance(version)
        self._recount(policy)
        for group, old in expired:
            self._expire(policy, old)
            if len(old) == group.size:
                self._left_buffer(group, fates.ClosedReason.EXPIRED)

    def _left_buffer(self, group: AdvantageGroup, reason: fates.ClosedReason) -> None:
        name = group.task_group_id
        self._buffered[name] -= 1
        if self._buffered[name] <= 0:
            del self._buffered[name]
            self._on_closed(name, reason)

    def _sequences_per_policy(self, trajectories: Iterable[Trajectory]) -> dict[str, int]:
        """Number of sequences per trained policy."""
        found: dict[str, int] = {}  # a Counter takes longer to make than to fill
        for trajectory in trajectories:
            for sequence in trajectory.sequences:
                if sequence.policy in self._policies:
                    found[sequence.policy] = found.get(sequence.policy, 0) + 1
        return found


KEPT_IN_MEMORY = 2  # the newest batches, for the ranks that ask a little later
WAIT_SHARE = 0.25  # of the time that the training step before took


class LateGroups:
    """Decides about groups that only a policy's next batch can train, and that still run.

        keep, mask   no action: their members are trained on arrival, old tokens masked with `mask`
        wait         the batch waits for them, once and for a share of the duration of the previous step
        drop         their open slots are cancelled, so that their finished members get into this batch

    The caller asks when the buffer has a full batch.
    """

    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._late = config.late_rule
        self._experience = experience
        self.cancel: Callable[[list[TaskGroup]], None] = lambda groups: None
        """Ends the open slots of groups; the calls repeat until the groups are finished."""
        self._clock = clock
        self._waited: set[str] = set()  # task groups that a batch has waited for
        self._began: float | None = None  # when the wait began that is going on
        self.step_s: float | None = None  # how long the newest training step took
        self.num_waited_for = 0  # task groups that the next batch waits for

    def settled(self) -> bool:
        """Whether unfinished groups allow the batch to be assembled now."""
        if self._late == "drop":
            # A group that another policy can still train continues; its members of this policy become too old.
            due = [g for g in self._experience.due(self._policy) if self._experience.is_due_everywhere(g)]
            if due:
                self.cancel(due)
            return not due
        if self._late != "wait":
            return True
        due = [g for g in self._experience.due(self._policy) if g.id not in self._waited]
        self.num_waited_for = len(due)
        if not due or self.step_s is None:
            return True
        if self._began is None:
            self._began = self._clock()
        return self.left_s() == 0.0

    def left_s(self) -> float | None:
        """Remaining seconds of the present wait; None without one."""
        if self._began is None or self.step_s is None:
            return None
        return max(0.0, self._began + WAIT_SHARE * self.step_s - self._clock())

    def taken(self) -> float:
        """Record that the batch was assembled; returns the seconds of its wait for these groups."""
        waited_s = 0.0 if self._began is None else self._clock() - self._began
        if self._late == "wait":
            due = {group.id for group in self._experience.due(self._policy)}
            self._waited = due if self._began is not None else self._waited & due
        self._began = None
        self.num_waited_for = 0
        return waited_s


class Batches:
    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        journal: Journal,
        *,
        clock: Callable[[], float],
        may_compute: Callable[[bool], bool] | None,
    ) -> None:
        """``may_compute``, of a shared device, is told whether a batch that a rank asks for is ready, and returns whether the
        trainer may compute on it now."""
        self.policy = policy
        self._config = config
        self._experience = experience
        self._journal = journal
        self.may_begin: Callable[[int], bool] = lambda training_step: True
        """Whether lockstep and threshold, where the run has one, let a step begin."""
        self._may_compute = may_compute
        self._clock = clock
        self.late = LateGroups(policy, config, experience, clock)
        self._taken_at: tuple[int, float] | None = None  # the newest batch that this process put together: step, when
        self._recent: dict[int, Batch] = {}
        self._changed = asyncio.Event()  # set when a wait may be over
        self._assembly = asyncio.Lock()
        self.newest_step = 0  # the newest recorded batch
        self.newest_version = -1
        self.paused = False
        self._closed = False
        self.num_waiting = 0  # ranks that wait for sequences
        self.staleness_max = 0  # largest ever put into a batch
        self.statistics: dict[int, Mapping[str, float]] = {}  # by step, until the step's version is published

    def recover(self, record: BatchRecord) -> None:
        """Note a recorded batch, of this process or an earlier one."""
        self.newest_step = max(self.newest_step, record.training_step)
        self.statistics[record.training_step] = record.statistics
        self.staleness_max = max(self.staleness_max, int(record.statistics.get(StepKey.STALENESS_MAX, 0)))

    def published(self, version: int) -> None:
        """Note a durable version of a training step."""
        self.newest_version = version
        self.newest_step = max(self.newest_step, version)  # also where the batch's record is lost
        if self._taken_at is not None and self._taken_at[0] == version:
            self.late.step_s = self._clock() - self._taken_at[1]

    @property
    def settled(self) -> bool:
        """Whether every begun batch has its version."""
        return self.newest_version >= self.newest_step and not self._assembly.locked()

    def notify(self) -> None:
        """Wake waiting calls after a change of the buffer, the newest version or the pause."""
        self._changed.set()

    async def get(self, training_step: int, timeout_s: float) -> Batch:
        """The batch of a training step; waits for sequences at most ``timeout_s``.

        Raises:
            DeadlineError: not enough sequences yet, or the version before is not published; ask again.
            InvalidRequestError: the batch of an earlier step was never asked for.
        """
        if training_step < 1:
            raise InvalidRequestError(f"training_step is {training_step}; the first is 1")
        if training_step > self.newest_step + 1:
            raise InvalidRequestError(
                f"training step {training_step} of {self.policy} cannot begin: the newest recorded batch is that of "
                f"step {self.newest_step}"
            )
        num_sequences = self._experience.buffers[self.policy].batch_size
        wanted = f"{self.policy}: batch of step {training_step} ({num_sequences} sequences)"
        self.num_waiting += 1
        try:
            async with deadline(timeout_s, wanted):
                while not self._is_granted(training_step):
                    self._changed.clear()
                    # While no batch may begin, the end of a wait for due groups has no effect; a timer would only poll.
                    takes = training_step > self.newest_step and self._may_take(training_step)
                    left_s = self.late.left_s() if takes else None
                    # Not ``asyncio.wait_for``, which drops a cancellation, or this deadline, that comes with the event.
                    with contextlib.suppress(TimeoutError):  # then such a wait is over
                        async with asyncio.timeout(left_s):
                            await self._changed.wait()
        finally:
            self.num_waiting -= 1
        if training_step <= self.newest_step:
            return await self._replay(training_step)
        # Shielded: a rank that goes away must not tear an assembly that has taken sequences from the buffer.
        return await asyncio.shield(asyncio.ensure_future(self._assemble(training_step)))

    def _is_granted(self, training_step: int) -> bool:
        """Whether the batch can be served, and the trainer may compute on it now."""
        if self._closed:
            raise InfrastructureError(f"the orchestrator is stopping: ask again for step {training_step}")
        assembled = self.newest_step >= training_step  # by another rank's call
        can_serve = assembled or (self._may_take(training_step) and self.late.settled())
        if not can_serve and self._assembly.locked():
            return False  # it is recorded for an earlier call, whose end wakes this one
        return can_serve if self._may_compute is None else self._may_compute(can_serve)

    def _may_take(self, training_step: int) -> bool:
        """Whether only groups that are due may hold the batch back."""
        # A step starts from the previous version, and counts its age from that version: wait for that version too.
        ready = self._experience.buffers[self.policy].ready and self.newest_version == training_step - 1
        return ready and not self.paused and self.may_begin(training_step)

    def close(self) -> None:
        """End all waits: the process is stopping."""
        self._closed = True
        self.notify()

    async def _assemble(self, training_step: int) -> Batch:
        async with self._assembly:
            if training_step <= self.newest_step:  # another rank was first
                return await self._replay(training_step)
            if not self.may_begin(training_step):  # training has ended since the wait for sequences did
                raise DeadlineError(f"{self.policy}: step {training_step} does not begin")
            groups, statistics = self._experience.take_batch(self.policy, training_step)
            statistics |= {StepFact.LATE_WAIT_S.value: self.late.taken()}
            num_fresh = sum(group.size for group in groups)
            has_replay = self.policy in self._experience.replay
            replayed = self._experience.draw_replayed(self.policy, training_step, num_fresh) if has_replay else []
            record, sequences = await called(
                assemble,
                *(self.policy, training_step, groups, self._config.minibatches, statistics, replayed),
                in_thread=num_fresh > MOST_AT_ONCE,
            )
            key = entries.batch_key(self.policy, training_step)
            await self._journal.append(entries.BATCH, key, record, self._experience.batch_recorded, groups)
            self.recover(record)
            self._taken_at = (training_step, self._clock())
            self._remember(Batch(record=record, sequences=sequences, replayed=True))
            self.notify()
            log.info("batch.ready", policy=self.policy, step=training_step, sequences=len(record.entries))
            return Batch(record=record, sequences=sequences, replayed=False)

    async def _replay(self, training_step: int) -> Batch:
        recent = self._recent.get(training_step)
        if recent is not None:
            return recent
        batch, lost = await asyncio.to_thread(self._read, training_step)
        if lost:
            self._experience.counters[fates.RunCount.SEQUENCES_LOST.value] += len(lost)
            log.error(
                "batch.incomplete", policy=self.policy, step=training_step, lost=len(lost), first=lost[0],
                effect="the batch is trained without them",
            )  # fmt: skip
        self._remember(batch)
        return batch

    def _read(self, training_step: int) -> tuple[Batch, list[str]]:
        with self._journal.reading:
            return read_what_is_left(self._journal.reader, self.policy, training_step)

    def _remember(self, batch: Batch) -> None:
        self._recent[batch.record.training_step] = batch
        for step in sorted(self._recent)[:-KEPT_IN_MEMORY]:
            if step != batch.record.training_step:
                del self._recent[step]

"""Any order of events: quotas are returned exactly once, the run never blocks, and the journal gives the same state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common import records
from services.common.config.data import SourceConfig
from services.common.config.processes import RolloutConfig
from services.common.config.training import BatchConfig
from services.common.errors import RolloutTimeoutError
from services.common.records import Segment, StopReason, TokenSequence, Trajectory
from services.orchestrator.buffer.assembly import assemble
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.buffer.buffer import AdvantageGroup, RewardRules, RewardTransform
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.journal.entries import BatchRecord, GroupVerdict
from tests.unit.orchestrator.builders import failure, order, trajectory

NUM_STEPS = 6
POLICIES = ("a", "b")
SOURCES = {
    name: SourceConfig(path="rows.jsonl", source=name, weight=weight) for name, weight in {"x": 1, "y": 2}.items()
}
REASONS = ("INFRASTRUCTURE", RolloutTimeoutError.reason, records.TOO_OLD)


@st.composite
def batch_configs(draw: st.DrawFn) -> BatchConfig:
    late = draw(st.sampled_from(["keep", "mask", "wait", "drop"]))
    staleness = draw(st.integers(0, 2))
    age = draw(st.sampled_from([None, 0, 1])) if late in ("keep", "wait") else None
    group_by = draw(st.sampled_from(["attempt", "rollout", "policy"]))
    resample = {"keep": 2} if group_by != "rollout" and draw(st.booleans()) else None
    overlong = draw(st.sampled_from([None, {"max_tokens": 4, "buffer_tokens": 2}]))
    return BatchConfig.model_validate(
        {
            "size": draw(st.integers(1, 3)), "max_staleness": staleness, "late": late, "group_by": group_by,
            "max_token_age": None if age is None else staleness + age, "dynamic_sampling": draw(st.booleans()),
            "resample": resample, "overlong_penalty": overlong,
            "order": "deadline" if late == "wait" else draw(st.sampled_from(["deadline", "fifo"])),
        }
    )  # fmt: skip


class Events(RuleBasedStateMachine):
    """A sequence of processes handles the events; ``log`` replaces the journal."""

    @initialize(
        configs=st.tuples(batch_configs(), batch_configs()),
        admit=st.sampled_from(["all", "any"]),
        on_timeout=st.sampled_from(["penalise", "as_scored"]),
        on_truncation=st.sampled_from(["penalise", "mask", "as_scored"]),
        clip=st.sampled_from([None, 0.5]),
        mixed=st.booleans(),
    )
    def begin(
        self, configs: tuple[BatchConfig, BatchConfig], admit: Any, on_timeout: Any, on_truncation: Any, clip: Any,
        mixed: bool,
    ) -> None:  # fmt: skip
        self.sources = SOURCES if mixed else {}
        self.configs = dict(zip(POLICIES, configs, strict=True))
        self.admit = admit
        self.reward_rules = RewardRules(
            rollout=RolloutConfig(on_timeout=on_timeout, on_truncation=on_truncation),
            transforms={"a": RewardTransform(clip=clip)},
            group_by={name: config.group_by for name, config in self.configs.items()},
        )
        self.log: list[tuple[str, Any]] = []
        self.closed: Counter[str] = Counter()
        self.surplus: dict[str, set[tuple[str, str, int]]] = {}  # of the verdicts
        self.names = 0
        self.groups: dict[str, TaskGroup] = {}
        self.experience = self.new(self.closed)
        self.taken: dict[str, tuple[list[AdvantageGroup], BatchRecord]] = {}  # not recorded yet
        self.training: dict[str, int] = {}  # sequences of recorded batches that are not published yet
        for policy in POLICIES:
            self.publish(policy, 0)

    def new(self, closed: Counter[str]) -> ExperiencePipeline:
        def on_closed(name: str, reason: records.ClosedReason) -> None:
            closed[name] += 1

        def on_judged(name: str, verdicts: list[GroupVerdict]) -> None:
            found = [v for v in verdicts if v.outcome is records.GroupFate.SURPLUS]
            self.surplus[name] = {(v.policy, v.role, v.attempt) for v in found}

        made = ExperiencePipeline(
            self.configs, NUM_STEPS, Counter(), admit=self.admit, on_closed=on_closed, on_judged=on_judged,
            rules=self.reward_rules, seed=7, sources=self.sources,
        )  # fmt: skip
        for mixture in made.mixtures.values():
            mixture._exhausted_after = 3
        return made

    def version(self, policy: str) -> int:
        return self.experience.admission.accounts[policy].version

    def publish(self, policy: str, number: int) -> None:
        self.log.append(("version", (policy, number)))
        self.experience.advanced(policy, number)

    # --- events ------------------------------------------------------------------------------------------------------

    @rule(policies=st.sampled_from([(), ("a",), ("b",)]), size=st.integers(1, 5), lag=st.integers(0, 1))
    def issue(self, policies: tuple[str, ...], size: int, lag: int) -> None:
        named = policies or POLICIES
        born = {policy: max(0, self.version(policy) - lag) for policy in named}
        lags = {policy: self.version(policy) - born[policy] for policy in named}
        if not self.experience.admission.open(named, lags):
            return
        self.names += 1
        source = self.experience.next_source(named)
        group = TaskGroup(order=replace(order(f"g{self.names}", size), policies=policies, source=source), born=born)
        self.log.append(("issue", (group.order, dict(born))))
        self.groups[group.id] = group
        self.experience.issued(group)

    def open_group(self, data: st.DataObject) -> TaskGroup:
        return self.groups[data.draw(st.sampled_from(sorted(self.groups)))]

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), kind=st.integers(0, 5))
    def resolve(self, data: st.DataObject, kind: int) -> None:
        group = self.open_group(data)
        index = data.draw(st.sampled_from(group.unresolved))
        outcome: Outcome
        if kind < len(REASONS):
            outcome = failure(group.id, index, REASONS[kind])
        else:
            found = data.draw(st.lists(self.sequences(group), max_size=3))
            outcome = trajectory(group.id, index, *found) if found else empty(group.id, index)
        self.log.append(("outcome", outcome))
        self.apply(self.experience, self.groups, outcome)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        """All that is open of a group, in one rule: most groups end so."""
        group = self.open_group(data)
        sequences = self.sequences(group)
        for index in group.unresolved:
            outcome = trajectory(group.id, index, *data.draw(st.lists(sequences, min_size=1, max_size=2)))
            self.log.append(("outcome", outcome))
            self.apply(self.experience, self.groups, outcome)

    def sequences(self, group: TaskGroup) -> st.SearchStrategy[TokenSequence]:
        @st.composite
        def made(draw: st.DrawFn) -> TokenSequence:
            policy = draw(st.sampled_from(group.order.policies or POLICIES))
            versions = sorted(draw(st.lists(st.integers(group.born[policy], self.version(policy)), max_size=2)))
            segments = (Segment.environment([1]), *(Segment.policy([3, 4], [-0.5, -0.5], v) for v in versions))
            return TokenSequence(
                policy=policy, segments=segments, reward=draw(st.sampled_from([-1.0, 0.0, 1.0])),
                stop_reason=draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH])),
                role=draw(st.sampled_from(["agent", "critic"])), attempt=draw(st.integers(0, 1)),
            )  # fmt: skip

        return made()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def reissue(self, data: st.DataObject) -> None:
        group = self.open_group(data)
        born = {policy: self.version(policy) for policy in group.born}
        self.log.append(("reissue", (group.id, born)))
        group.born = dict(born)

    @rule(policy=st.sampled_from(POLICIES))
    def take(self, policy: str) -> None:
        step = self.version(policy) + 1
        held = policy in self.taken or policy in self.training
        if held or step > NUM_STEPS or not self.experience.buffers[policy].ready:
            return
        groups, statistics = self.experience.take_batch(policy, step)
        record, _ = assemble(policy, step, groups, 1, statistics)
        self.taken[policy] = groups, record

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(sorted(self.taken)))
        self.recorded(policy)

    def recorded(self, policy: str) -> None:
        groups, record = self.taken.pop(policy)
        self.log.append(("batch", record))
        self.experience.batch_recorded(groups)
        self.training[policy] = len(record.entries)

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(sorted(self.training)))
        del self.training[policy]
        self.publish(policy, self.version(policy) + 1)

    @rule(policy=st.sampled_from(POLICIES))
    def step(self, policy: str) -> None:
        """A whole training step in one rule: most steps have no event in between."""
        self.take(policy)
        if policy in self.taken:
            self.recorded(policy)
        if policy in self.training:
            del self.training[policy]
            self.publish(policy, self.version(policy) + 1)

    @rule(policy=st.sampled_from(POLICIES))
    def trainer_comes_or_goes(self, policy: str) -> None:
        """Not journaled, unlike its consequences."""
        self.experience.admission.absent ^= {policy}

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        group = self.groups.pop(self.open_group(data).id)
        self.experience.cancelled(group)
        self.closed[group.id] += 1

    @rule()
    def crash(self) -> None:
        recovered, groups = self.recovered()
        if not self.taken:  # taken but unrecorded groups are in the buffer again
            assert state(recovered) == state(self.experience)
        self.taken.clear()
        self.experience, self.groups = recovered, groups

    def recovered(self) -> tuple[ExperiencePipeline, dict[str, TaskGroup]]:
        closed_before = set(self.closed)
        experience, groups = self.new(self.closed), dict[str, TaskGroup]()
        experience.surplus_before = dict(self.surplus)
        for kind, value in self.log:
            if kind == "issue" and value[0].task_group_id not in closed_before:
                group = TaskGroup(order=value[0], born=dict(value[1]))
                groups[group.id] = group
                experience.issued(group)
            elif kind == "outcome" and value.task_group_id in groups:
                self.apply(experience, groups, value)
            elif kind == "reissue" and value[0] in groups:
                groups[value[0]].born = dict(value[1])
            elif kind == "batch":
                experience.recover_batch(value)
                experience.mixtures[value.policy].recover(value.statistics)
            elif kind == "version":
                experience.advanced(*value)
        experience.surplus_before = {}
        experience.admission.absent = set(self.experience.admission.absent)
        return experience, groups

    def apply(self, experience: ExperiencePipeline, groups: dict[str, TaskGroup], outcome: Outcome) -> None:
        group = groups[outcome.task_group_id]
        assert group.resolve(outcome)
        if group.complete:
            del groups[group.id]
        experience.resolved(group, outcome)

    # --- invariants ------------------------------------------------------------------------------------------------------

    @invariant()
    def accounts_say_what_is_there(self) -> None:
        if not hasattr(self, "experience"):
            return
        for policy in POLICIES:
            account, buffer = self.experience.admission.accounts[policy], self.experience.buffers[policy]
            mine = [g for g in self.groups.values() if policy in (g.order.policies or POLICIES)]
            unfinished = sum(s.policy == policy for g in mine for t in g.trajectories for s in t.sequences)
            taken = len(self.taken[policy][1].entries) if policy in self.taken else 0
            assert account.running_slots == sum(len(g.unresolved) for g in mine)
            assert account.unfinished == unfinished
            assert account.in_training == self.training.get(policy, 0) + taken
            assert account.accepted == account.unfinished + account.in_training + buffer.num_sequences
            assert buffer.num_sequences == sum(group.size for group in buffer.groups)
            mixture = self.experience.mixtures[policy]
            for source in mixture.shares:
                assert mixture.is_running(source) == any(g.order.source == source for g in mine)
                assert buffer.num_of_source[source] == sum(g.size for g in buffer.groups if g.source == source)
            known = [group for group in self.experience.unfinished.values() if policy in group.born]
            assert {g.id for g in known} == {g.id for g in mine}

    @invariant()
    def task_groups_are_closed_once_and_at_the_end(self) -> None:
        if not hasattr(self, "experience"):
            return
        waiting = {g.task_group_id for b in self.experience.buffers.values() for g in b.groups}
        pending = {g.task_group_id for groups, _ in self.taken.values() for g in groups}
        assert set(self.experience._buffered) == waiting | pending
        assert not set(self.closed) & (waiting | pending | set(self.groups))
        issued = {f"g{number}" for number in range(1, self.names + 1)}
        assert issued == set(self.closed) | waiting | pending | set(self.groups)

    @invariant()
    def something_can_go_on(self) -> None:
        """Without running slots and without a batch in training, the buffer has a batch or another group may be issued."""
        if not hasattr(self, "experience") or self.groups or self.training or self.taken:
            return
        for policy in POLICIES:
            left = self.experience.admission.accounts[policy].steps_left > 0
            if left and policy not in self.experience.admission.absent:
                assert self.experience.buffers[policy].ready or self.experience.admission.open((policy,))


def empty(name: str, index: int) -> Outcome:
    """A rollout that left no sequence."""
    return Trajectory(task_group_id=name, index=index, sequences=(), reward=0.0)


def state(experience: ExperiencePipeline) -> dict[str, Any]:
    """All state that decides about the next issue and batch, except the mean number of sequences per rollout."""
    found: dict[str, Any] = {}
    for policy in POLICIES:
        account, buffer = experience.admission.accounts[policy], experience.buffers[policy]
        waiting = [
            (
                buffer._place(group), group.task_group_id, group.role, group.attempt, group.mean, group.std, group.num_compared,
                [(m.sequence_id, m.sequence.reward, m.sequence.min_version) for m in group.members],
            )
            for group in sorted(buffer.groups, key=buffer._place)
        ]  # fmt: skip
        found[policy] = {
            "accepted": account.accepted, "unfinished": account.unfinished, "in_training": account.in_training,
            "running": account.running_slots, "version": (account.version, buffer.version), "waiting": waiting,
            "trained": +experience.mixtures[policy].trained if experience.mixtures[policy].is_mixed else {},
            "due": [group.id for group in experience.due(policy)],
        }  # fmt: skip
    return {**found, "buffered": dict(experience._buffered)}


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

"""Evaluations: passes over fixed tasks, each on pinned weight versions.

Invariant: the denominator never shrinks: a failed rollout counts as 0 and is reported. Knows nothing about replicas or
the journal; whoever plays the groups says what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.common.config.data import EvaluationConfig
from services.common.types import Purpose, Sampling, TaskGroupOrder, Trajectory
from services.orchestrator.datasets import TaskSource
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.orders import GroupNames, sampling_of, seed_of


@dataclass(slots=True, kw_only=True)
class EvaluationPass:
    """One way of sampling, over all evaluation tasks."""

    name: str  # "start/greedy"
    versions: Mapping[str, int]
    sampling: Sampling
    num_tasks: int
    samples_per_task: int
    next_row: int = 0
    issued_rows: set[int] = field(default_factory=set)  # before a restart
    reward_sum: float = 0.0
    num_resolved: int = 0
    num_failed: int = 0
    group_ids: set[str] = field(default_factory=set)

    @property
    def num_trajectories(self) -> int:
        return self.num_tasks * self.samples_per_task

    @property
    def finished(self) -> bool:
        return self.num_resolved == self.num_trajectories

    def result(self) -> EvaluationResult:
        return EvaluationResult(
            name=self.name,
            versions=dict(self.versions),
            mean_reward=self.reward_sum / self.num_trajectories,
            num_trajectories=self.num_trajectories,
            num_failed=self.num_failed,
        )


class Evaluations:
    def __init__(
        self,
        config: EvaluationConfig,
        source: TaskSource | None,
        names: GroupNames,
        *,
        timeout_s: float,
        seed: int,
        on_result: Callable[[EvaluationResult], None],
    ) -> None:
        self._config = config
        self._source = source
        self._names = names
        self._timeout_s = timeout_s
        self._seed = seed
        self._on_result = on_result
        self._passes: dict[str, EvaluationPass] = {}  # unfinished ones, in order
        self.results: dict[str, EvaluationResult] = {}

    @property
    def possible(self) -> bool:
        return self._source is not None

    @property
    def running(self) -> bool:
        return bool(self._passes)

    def names_of(self, evaluation_id: str) -> list[str]:
        return [f"{evaluation_id}/{sampling}" for sampling in self._config.samplings]

    def begin(self, evaluation_id: str, versions: Mapping[str, int]) -> None:
        """Queue the passes of an evaluation; those that are queued or finished already are left alone."""
        if self._source is None:
            return
        for name, sampling in zip(self.names_of(evaluation_id), self._config.samplings.values(), strict=True):
            if name not in self._passes and name not in self.results:
                self._passes[name] = EvaluationPass(
                    name=name,
                    versions=versions,
                    sampling=sampling_of(sampling),
                    num_tasks=len(self._source),
                    samples_per_task=self._config.samples_per_task,
                )

    def finished(self, evaluation_id: str) -> bool:
        return all(name in self.results for name in self.names_of(evaluation_id))

    def next_group(self) -> TaskGroup | None:
        """A task group of the first pass that has one left to issue."""
        for current in self._passes.values():
            while current.next_row in current.issued_rows:
                current.next_row += 1
            if current.next_row < current.num_tasks:
                return self._group(current)
        return None

    def put_back(self, group: TaskGroup) -> None:
        """A group that ``next_group`` made could not be issued."""
        current = self._passes[group.evaluation]
        current.next_row = group.position
        current.group_ids.discard(group.id)

    def _group(self, current: EvaluationPass) -> TaskGroup:
        assert self._source is not None
        row = current.next_row
        current.next_row += 1
        order = TaskGroupOrder(
            task_group_id=self._names.draw(),
            task=self._source[row],
            indices=tuple(range(current.samples_per_task)),
            purpose=Purpose.EVALUATION,
            sampling=current.sampling,
            required_versions=dict(current.versions),
            # Not the pass's name: every evaluation draws the same way, so that two versions are compared fairly.
            seed=seed_of(self._seed, f"evaluation/{current.name.rpartition('/')[2]}", row),
            timeout_s=self._timeout_s,
        )
        current.group_ids.add(order.task_group_id)
        return TaskGroup(order=order, position=row, evaluation=current.name)

    def issued_before(self, group: TaskGroup) -> None:
        """A group that an earlier process issued."""
        if group.evaluation in self._passes:
            self._passes[group.evaluation].issued_rows.add(group.position)
            self._passes[group.evaluation].group_ids.add(group.id)

    def resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """A slot of one of its groups got its outcome."""
        current = self._passes.get(group.evaluation)
        if current is None:
            return
        current.num_resolved += 1
        if isinstance(outcome, Trajectory):
            current.reward_sum += outcome.reward
        else:
            current.num_failed += 1
        if current.finished:
            del self._passes[current.name]
            result = current.result()
            self.results[current.name] = result
            self._on_result(result)

    def recover_result(self, result: EvaluationResult) -> None:
        self._passes.pop(result.name, None)
        self.results[result.name] = result

    def progress(self) -> list[tuple[str, int, int]]:
        """(name, resolved, all) of the unfinished passes."""
        return [(p.name, p.num_resolved, p.num_trajectories) for p in self._passes.values()]

    def known(self, evaluation_id: str) -> bool:
        return any(name in self._passes or name in self.results for name in self.names_of(evaluation_id))

    def pinned_versions(self) -> list[Mapping[str, int]]:
        """What unfinished passes are played on."""
        return [current.versions for current in self._passes.values()]

    def group_ids(self) -> set[str]:
        """Task groups of unfinished passes: their rewards are needed until the pass has its result."""
        return {name for current in self._passes.values() for name in current.group_ids}

    def unissued(self, gone: Callable[[Mapping[str, int]], bool]) -> list[TaskGroup]:
        """All groups left of passes whose versions are ``gone``; the caller fails them."""
        groups: list[TaskGroup] = []
        for current in self._passes.values():
            if gone(current.versions):
                for row in range(current.next_row, current.num_tasks):
                    if row not in current.issued_rows:
                        current.next_row = row
                        groups.append(self._group(current))
                current.next_row = current.num_tasks
        return groups

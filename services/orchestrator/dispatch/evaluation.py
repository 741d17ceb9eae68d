"""Evaluations: passes over fixed tasks, each on pinned weight versions where that delays no training.

Invariant: the denominator never shrinks: a failed rollout has a score (``evaluation.failed_reward``) and is reported.
Independent of replicas and the journal; the dispatcher chooses the replicas (``evaluators``) and reports the outcomes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson

from services.common.config.data import EvaluationConfig
from services.common.config.recipe import Recipe
from services.common.finite import finite
from services.common.records.types import Purpose, Sampling, TaskGroupOrder, Trajectory
from services.common.seeds import derived_seed
from services.orchestrator.buffer.assembly import MOST_ROLES, OTHER_ROLES
from services.orchestrator.buffer.rewards import RewardRules, filled_rows
from services.orchestrator.dispatch.threshold import step_of
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.state.groups import Outcome, TaskGroup
from services.orchestrator.state.scores import DatasetScore, compared, overall, overall_difference, score
from services.orchestrator.tasks.datasets import TaskSource
from services.orchestrator.tasks.orders import GroupNames, sampling_of


def kind_of(name: str) -> str:
    """Kind of a pass, the same for all versions: its sampling, and its policy where policies play apart.

    >>> kind_of("start/greedy/model0")
    'greedy/model0'
    """
    return name.partition("/")[2]


@dataclass(slots=True, kw_only=True)
class EvaluationPass:
    """A pass with one sampling setting over all evaluation tasks."""

    name: str  # "start/greedy"
    evaluation_id: str
    wanted: Mapping[str, int]  # versions to be evaluated, or newer ones where training goes on
    sampling: Sampling
    samples: tuple[int, ...]  # by row; 0 for one that is not played
    policies: tuple[str, ...] = ()  # that play; () is all of the run
    versions: Mapping[str, int] = field(default_factory=dict)  # pinned versions, once decided
    pinned: bool | None = None  # None until the replicas are decided
    evaluators: frozenset[str] = frozenset()  # replicas that run this pass and no training; empty: any replica
    awaited: frozenset[str] = frozenset()  # until the decision: replicas that hear of no version beyond the next
    next_row: int = 0
    issued_rows: set[int] = field(default_factory=set)  # before a restart
    rewards: dict[int, list[float | None]] = field(default_factory=dict)  # by row; None where no number is given
    failed: dict[int, list[float | None]] = field(default_factory=dict)  # the same of samples that failed
    num_issued: int = 0
    num_resolved: int = 0
    num_failed: int = 0
    oldest: dict[str, int] = field(default_factory=dict)  # versions seen in the outcomes
    newest: dict[str, int] = field(default_factory=dict)
    finished_at: float = 0.0  # of the newest trajectory, in seconds since the epoch
    group_ids: set[str] = field(default_factory=set)
    roles: dict[str, tuple[float, int]] = field(default_factory=dict)  # "policy/role/attempt" -> rewards, sequences

    @property
    def num_trajectories(self) -> int:
        return sum(self.samples)

    @property
    def finished(self) -> bool:
        return self.num_resolved == self.num_trajectories

    @property
    def has_left(self) -> bool:
        """Whether a row is left to issue."""
        while self.next_row in self.issued_rows or (self.next_row < len(self.samples) and not self.next_samples):
            self.next_row += 1
        return self.next_row < len(self.samples)

    @property
    def next_samples(self) -> int:
        """Samples of the next row."""
        return self.samples[self.next_row]

    @property
    def num_in_flight(self) -> int:
        """Issued trajectories without an outcome."""
        return self.num_issued - self.num_resolved

    def required(self) -> Mapping[str, int]:
        return self.versions if self.pinned else {}

    def issue(self, group_id: str, row: int) -> None:
        """Count the trajectories of a group of the pass, once."""
        if group_id not in self.group_ids:
            self.group_ids.add(group_id)
            self.num_issued += self.samples[row]

    def note(self, outcome: Outcome, reward: float | None, row: int) -> None:
        """Count an outcome of a group of the pass, with the value ``reward``."""
        self.num_resolved += 1
        if not isinstance(outcome, Trajectory):
            self.num_failed += 1
            self.failed.setdefault(row, []).append(reward)
            return
        self.rewards.setdefault(row, []).append(reward)
        self.finished_at = max(self.finished_at, outcome.finished_at)
        for sequence in outcome.sequences:
            role = f"{sequence.policy}/{sequence.role}/{sequence.attempt}"
            if role not in self.roles and len(self.roles) >= MOST_ROLES:
                role = OTHER_ROLES
            total, count = self.roles.get(role, (0.0, 0))
            self.roles[role] = (finite(total + sequence.reward), count + 1)
            for segment in sequence.segments:
                if segment.is_policy:
                    policy, version = sequence.policy, segment.weight_version
                    self.oldest[policy] = min(version, self.oldest.get(policy, version))
                    self.newest[policy] = max(version, self.newest.get(policy, version))


class Evaluations:
    def __init__(
        self,
        config: EvaluationConfig,
        sources: Mapping[str, TaskSource],
        names: GroupNames,
        *,
        timeout_s: float,
        seed: int,
        on_result: Callable[[EvaluationResult], None],
        compositions: Sequence[tuple[str, ...]] = ((),),
        samples: Mapping[str, int] = MappingProxyType({}),
        rules: RewardRules | None = None,
        started_at: float = 0.0,
    ) -> None:
        """``compositions``: policies that are evaluated together, each in a pass of its own. ``samples``: those per task
        of datasets that do not take the number of all. ``started_at``: when the run began."""
        self._config = config
        self._rules = rules or RewardRules()
        self._sources = dict(sources)
        self._samples = dict.fromkeys(sources, config.samples_per_task) | dict(samples)
        self._rows = [(name, row) for name, source in self._sources.items() for row in range(len(source))]
        self._names = names
        self._timeout_s = timeout_s
        self._seed = seed
        self._on_result = on_result
        self._started_at = started_at
        self._compositions = tuple(compositions)
        self._digests = {name: _digest(source, range(len(source))) for name, source in self._sources.items()}
        self._passes: dict[str, EvaluationPass] = {}  # unfinished ones, in order
        self.results: dict[str, EvaluationResult] = {}

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        sources: Mapping[str, TaskSource],
        names: GroupNames,
        rules: RewardRules,
        on_result: Callable[[EvaluationResult], None],
        started_at: float,
    ) -> Evaluations:
        """The evaluations of a recipe."""
        sections = recipe.data.evaluation.items()
        return cls(
            recipe.evaluation,
            sources,
            names,
            timeout_s=recipe.rollout.timeout_s,
            seed=recipe.run.seed,
            on_result=on_result,
            rules=rules,
            compositions=recipe.evaluation_compositions(),
            samples={name: data.samples_per_task for name, data in sections if data.samples_per_task},
            started_at=started_at,
        )

    @property
    def possible(self) -> bool:
        return bool(self._rows)

    @property
    def running(self) -> bool:
        return bool(self._passes)

    def __iter__(self) -> Iterator[EvaluationPass]:
        """Unfinished passes, in order."""
        return iter(list(self._passes.values()))

    def names_of(self, evaluation_id: str) -> list[str]:
        return [name for name, _, _ in self._kinds(evaluation_id)]

    def _kinds(self, evaluation_id: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """(name of the pass, name of its sampling, its policies) of all passes."""
        apart = len(self._compositions) > 1
        return [
            (f"{evaluation_id}/{sampling}" + (f"/{policies[0]}" if apart else ""), sampling, policies)
            for policies in self._compositions
            for sampling in self._samplings(evaluation_id)
        ]

    def _samplings(self, evaluation_id: str) -> list[str]:
        during = self._config.during_samplings if step_of(evaluation_id) else []
        return [name for name in self._config.samplings if not during or name in during]

    def _samples_of(self, evaluation_id: str) -> tuple[int, ...]:
        """Samples by row; 0 for a row that the evaluation of a training step leaves out."""
        step, most = step_of(evaluation_id), self._config.during_tasks
        if not step or most is None:
            return tuple(self._samples[dataset] for dataset, _ in self._rows)
        chosen = {name: set(self._chosen(name, step, most)) for name in self._sources}
        return tuple(self._samples[dataset] if place in chosen[dataset] else 0 for dataset, place in self._rows)

    def _chosen(self, dataset: str, step: int, most: int) -> list[int]:
        """Rows that the evaluation of a training step plays: the next ones of a fixed random order."""
        order = list(range(len(self._sources[dataset])))
        random.Random(derived_seed(self._seed, "evaluation order", dataset)).shuffle(order)
        begin = (step // max(1, self._config.every) - 1) * most
        return [order[(begin + i) % len(order)] for i in range(min(most, len(order)))]

    def begin(self, evaluation_id: str, versions: Mapping[str, int]) -> None:
        """Queue the passes of an evaluation, except those already queued or finished."""
        if not self.possible:
            return
        for name, sampling, policies in self._kinds(evaluation_id):
            if name not in self._passes and name not in self.results:
                self._passes[name] = EvaluationPass(
                    name=name,
                    evaluation_id=evaluation_id,
                    wanted={policy: versions[policy] for policy in policies or versions},
                    sampling=sampling_of(self._config.samplings[sampling]),
                    samples=self._samples_of(evaluation_id),
                    policies=policies,
                )

    def finished(self, evaluation_id: str) -> bool:
        return all(name in self.results for name in self.names_of(evaluation_id))

    def has_room(self, current: EvaluationPass) -> bool:
        """Whether ``evaluation.max_in_flight`` admits the next task group of a pass."""
        limit = self._config.max_in_flight
        in_flight = sum(other.num_in_flight for other in self._passes.values())
        return limit is None or in_flight + current.next_samples <= limit

    def draw(self, current: EvaluationPass) -> TaskGroup:
        """The next task group of a pass with unissued groups; its replicas are decided by now."""
        assert current.pinned is not None
        assert current.has_left
        row = current.next_row
        current.next_row += 1
        dataset, place = self._rows[row]
        order = TaskGroupOrder(
            task_group_id=self._names.draw(),
            task=self._sources[dataset][place],
            indices=tuple(range(current.samples[row])),
            purpose=Purpose.EVALUATION,
            source=dataset,
            sampling=current.sampling,
            required_versions=dict(current.required()),
            # By dataset and row alone, so that all passes draw common random numbers: versions, and ways of sampling,
            # are compared by the differences of their items (scores.py).
            seed=derived_seed(self._seed, "evaluation", dataset, place),
            timeout_s=self._timeout_s,
            policies=current.policies,
        )
        current.issue(order.task_group_id, row)
        return TaskGroup(order=order, position=row, evaluation=current.name)

    def issued_before(self, group: TaskGroup) -> None:
        """Register a group that an earlier process issued."""
        current = self._passes.get(group.evaluation)
        if current is None:
            return
        current.issued_rows.add(group.position)
        current.issue(group.id, group.position)
        current.versions = group.order.required_versions
        current.pinned = bool(group.order.required_versions)

    def resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """Count the outcome of a slot of an evaluation's group."""
        current = self._passes.get(group.evaluation)
        if current is None:
            return
        reward = self._rules.outcome_reward(outcome)
        if reward is None and not isinstance(outcome, Trajectory):
            reward = self._config.failed_reward
        current.note(outcome, reward, group.position)
        if current.finished:
            del self._passes[current.name]
            result = self._result(current)
            self.results[current.name] = result
            self._on_result(result)

    def _result(self, current: EvaluationPass) -> EvaluationResult:
        scores = tuple(self._scores(current))
        pinned = bool(current.pinned)
        base = next((other for other in self.results.values() if kind_of(other.name) == kind_of(current.name)), None)
        return EvaluationResult(
            name=current.name,
            versions=dict(current.versions if pinned else current.oldest or current.wanted),
            newest_versions=dict(current.versions if pinned else current.newest or current.wanted),
            pinned=pinned,
            mean_reward=overall(scores),
            num_trajectories=current.num_trajectories,
            num_failed=current.num_failed,
            datasets=compared(base.datasets, scores) if base is not None else scores,
            compared_with=base.name if base is not None else "",
            difference=overall_difference(base.datasets, scores) if base is not None else None,
            roles={role: total / count for role, (total, count) in sorted(current.roles.items())},
            elapsed_s=max(0.0, current.finished_at - self._started_at),
        )

    def _scores(self, current: EvaluationPass) -> Iterator[DatasetScore]:
        for name, source in self._sources.items():
            rows = [row for row, (dataset, _) in enumerate(self._rows) if dataset == name and current.samples[row]]
            places = [self._rows[row][1] for row in rows]
            digest = self._digests[name] if len(rows) == len(source) else _digest(source, places)
            rewards = filled_rows([current.rewards.get(row, []) + current.failed.get(row, []) for row in rows])
            yield score(
                name,
                [
                    source[place].task_id if row in current.failed else ""
                    for row, place in zip(rows, places, strict=True)
                ],
                rewards,
                [len(current.failed.get(row, [])) for row in rows],
                self._config.pass_reward,
                digest,
            )

    def recover_result(self, result: EvaluationResult) -> None:
        self._passes.pop(result.name, None)
        self.results[result.name] = result

    def progress(self) -> list[tuple[str, int, int]]:
        """(name, resolved, all) of the unfinished passes."""
        return [(p.name, p.num_resolved, p.num_trajectories) for p in self._passes.values()]

    def is_running(self, name: str) -> bool:
        """Whether a pass of this name is queued or running."""
        return name in self._passes

    def known(self, evaluation_id: str) -> bool:
        return any(name in self._passes or name in self.results for name in self.names_of(evaluation_id))

    def pinned_versions(self) -> list[Mapping[str, int]]:
        """Pinned versions of the unfinished passes."""
        return [current.versions for current in self._passes.values() if current.pinned]

    def group_ids(self) -> set[str]:
        """Task groups of unfinished passes: the pass needs their rewards until its result."""
        return {name for current in self._passes.values() for name in current.group_ids}

    def unissued(self, gone: Callable[[Mapping[str, int]], bool]) -> list[TaskGroup]:
        """All unissued groups of pinned passes whose versions are ``gone``; the caller fails them."""
        groups: list[TaskGroup] = []
        for current in self._passes.values():
            if current.pinned and gone(current.versions):
                while current.has_left:
                    groups.append(self.draw(current))
        return groups


def _digest(source: TaskSource, places: Iterable[int]) -> str:
    """Digest of these rows, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for place in places:
        digest.update(orjson.dumps(source[place].data, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))
    return digest.hexdigest()

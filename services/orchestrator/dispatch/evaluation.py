"""Evaluations: passes over fixed tasks (``Evaluations``), and the replicas that play them (``Evaluators``).

Invariant: the denominator never shrinks: a failed rollout has a score (``evaluation.failed_reward``) and is reported.

Each pass is on pinned weight versions, unless ``evaluation.share`` puts training first. ``Evaluators`` chooses its
replicas:

    no training                  -> every replica, pinned to the newest versions
    spare replicas               -> ``evaluation.engines`` whole replicas, pinned to their held versions; training elsewhere
    none spare                   -> the same: training groups begin again after the last task of the pass
    none spare, with a share     -> a pass that fits into ``evaluation.share`` of one replica: the same; a larger one: that
                                    share of the slots, following training: ``pinned: false``, with the range of versions

A pinned replica takes no newer version and no new training group until the evaluation has issued its last task; the
replica finishes its running work. So one replica is held for the duration of its longest rollouts, not for a queue of
them. Independent of the journal and grpc; the dispatcher issues the task groups and reports the outcomes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import orjson

from services.common.config.data import EvaluationConfig
from services.common.config.recipe import Recipe
from services.common.records.types import Purpose, TaskGroupOrder, Trajectory
from services.common.seeds import derived_seed
from services.orchestrator.buffer.buffer import RewardRules, filled_rows
from services.orchestrator.dispatch.evaluation_pass import EvaluationPass, kind_of
from services.orchestrator.dispatch.threshold import step_of
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.replica import Held, Replica, Shelf, ShelfKey
from services.orchestrator.state.groups import Outcome, TaskGroup
from services.orchestrator.state.scores import DatasetScore, score
from services.orchestrator.tasks.datasets import TaskSource
from services.orchestrator.tasks.orders import GroupNames, sampling_of


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

    def skip(self, which: Callable[[EvaluationPass], bool]) -> list[EvaluationPass]:
        """Forget the unfinished passes of training steps that ``which`` chooses, and return them."""
        return [self._passes.pop(p.name) for p in self if step_of(p.evaluation_id) and which(p)]

    def newest_step(self) -> int:
        """The newest training step with an evaluation, begun or finished; 0 before the first."""
        names = [*self.results, *self._passes]
        return max((step_of(name.partition("/")[0]) or 0 for name in names), default=0)

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
        kind = kind_of(current.name)
        same = (other for other in self.results.values() if kind_of(other.name) == kind)
        base = next((other for other in same if other.mean_reward is not None), None)
        return current.result(tuple(self._scores(current)), base, self._started_at)

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

    def progress(self) -> list[str]:
        """How far the unfinished passes are, in words."""
        return [current.standing() for current in self._passes.values()]

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


class Evaluators:
    def __init__(
        self,
        config: EvaluationConfig,
        evaluations: Evaluations,
        pool: ReplicaPool,
        may_play: Callable[[Mapping[str, Held], Mapping[str, int], tuple[str, ...]], bool],
        newest: Callable[[str], int],
    ) -> None:
        """``may_play``: whether these versions are known, and exactly the required ones. ``newest``: number of a
        policy's newest version."""
        self._config = config
        self._evaluations = evaluations
        self._pool = pool
        self._may_play = may_play
        self._newest = newest

    def place(self, current: EvaluationPass, training: bool) -> str:
        """Decide the replicas of an undecided pass; returns the missing condition, empty when decided."""
        awaits = current.pinned is None and (training or self.may_come(current))
        if awaits and not self._adopt_sibling(current):
            return self._choose(current, training)
        if current.pinned is None:  # training is over, and no replica will hold the requested versions
            newest = {policy: max(number, self._newest(policy)) for policy, number in current.wanted.items()}
            current.versions, current.pinned, current.awaited = newest, True, frozenset()
        if not current.pinned:
            return ""
        if self._is_newest(current) and not training:
            current.evaluators = frozenset()
        elif not any(self._pool.get(name) is not None for name in current.evaluators):
            holders = self._workers(current, lambda shelf: self._holds(shelf.held, current, current.versions))
            current.evaluators = frozenset(holders[: self._config.engines])
        return ""

    def repeats_the_end(self, current: EvaluationPass) -> bool:
        """Whether a pass, after training, would be played by the newest versions."""
        return not self.may_come(current) if current.pinned is None else not current.pinned or self._is_newest(current)

    def _is_newest(self, current: EvaluationPass) -> bool:
        return all(number >= self._newest(policy) for policy, number in current.versions.items())

    def may_come(self, current: EvaluationPass) -> bool:
        """Whether a replica holds the requested versions or older ones, so that they may still be evaluated."""
        helds = (shelf.held for shelf in self._pool.free.shelves() if _serves(shelf.held, current))
        return any(all(held[p].number <= number for p, number in current.wanted.items()) for held in helds)

    def freest(self, current: EvaluationPass, num_slots: int) -> Replica | None:
        """The replica for the next task group of this pass, with the most free slots of those that can."""
        required = current.required()
        if current.evaluators:
            chosen = (self._pool.get(name) for name in current.evaluators if name in self._pool.free)
            usable = [
                r for r in chosen if r is not None and r.fits(num_slots) and self._holds(r.held, current, required)
            ]
            return max(usable, key=lambda r: (r.num_free, r.replica_id), default=None)
        if current.pinned:
            return self._pool.freest(num_slots, lambda shelf: self._holds(shelf.held, current, required))
        name = self._pool.free_of_evaluations.freest(
            num_slots,
            lambda shelf: self._within_share(shelf.alike, num_slots) and self._holds(shelf.held, current, required),
        )
        return None if name is None else self._pool.get(name)

    def reserved(self) -> frozenset[str]:
        """Replicas without training groups, because an evaluation has tasks for them that may begin."""
        waiting = (current for current in self._evaluations if current.has_left and self._evaluations.has_room(current))
        return frozenset().union(*(current.evaluators for current in waiting))

    def pinned_version(self, replica: Replica, policy: str) -> int | None:
        """The version that the replica keeps for an evaluation, also between two of its tasks."""
        for current in self._evaluations:
            if current.pinned and replica.replica_id in current.evaluators and current.has_left:
                return current.versions.get(policy)
        return replica.pinned_version(policy)

    def awaited_version(self, replica: Replica, policy: str) -> int | None:
        """The least version that an evaluation awaits on the replica, if any."""
        for current in self._evaluations:
            if replica.replica_id in current.awaited and current.has_left:
                return current.wanted.get(policy)
        return None

    def _choose(self, current: EvaluationPass, training: bool) -> str:
        able = [shelf for shelf in self._pool.free.shelves() if _serves(shelf.held, current)]
        is_few = sum(len(shelf.places) for shelf in able) <= self._config.engines
        share = self._config.share if training else None
        if is_few and share and not any(self._fits(name, current, share) for shelf in able for _, name in shelf.places):
            current.pinned, current.versions, current.awaited = False, current.wanted, frozenset()
            return ""
        policies = tuple(current.wanted)
        ready = self._workers(
            current,
            lambda shelf: (
                self._may_play(shelf.held, {}, policies)
                and all(shelf.held[p].number >= n for p, n in current.wanted.items())
                and not any(policy in shelf.alike.moving for policy in policies)
            ),  # the replica would leave its held version
        )
        if not ready:
            # With versions that follow each other faster than they are fetched, no replica would ever stand still.
            if not any(self._is_worker(name, current) for name in current.awaited):
                current.awaited = frozenset(self._workers(current)[: self._config.engines])
            return "no replica holds the version to evaluate yet"
        current.awaited = frozenset()
        holders = [replica for name in ready if (replica := self._pool.get(name)) is not None]
        nearest = min(holders, key=lambda replica: sum(replica.held[policy].number for policy in policies))
        current.versions = {policy: nearest.held[policy].number for policy in policies}
        alike = [name for name in ready if self._holds_now(name, current.versions, policies)]
        current.pinned, current.evaluators = True, frozenset(alike[: self._config.engines])
        return ""

    def _holds_now(self, name: str, versions: Mapping[str, int], policies: tuple[str, ...]) -> bool:
        replica = self._pool.get(name)
        return replica is not None and self._may_play(replica.held, versions, policies)

    def _adopt_sibling(self, current: EvaluationPass) -> bool:
        """Adopt versions and replicas of another pass of the same evaluation and policies; False without a decided one."""
        for other in self._evaluations:
            same = other.evaluation_id == current.evaluation_id and other.policies == current.policies
            if other is not current and same and other.pinned is not None:
                current.pinned, current.versions, current.evaluators = other.pinned, other.versions, other.evaluators
                return True
        return False

    def _workers(self, current: EvaluationPass, serves: Callable[[Shelf], bool] = lambda shelf: True) -> list[str]:
        """Replicas that take work, hold all policies of the pass and belong to shelves that ``serves``: freest first,
        then by id. Scans every replica, so the caller asks once per decision, not per task group."""
        able = [shelf for shelf in self._pool.free.shelves() if _serves(shelf.held, current) and serves(shelf)]
        places = sorted((-free, name) for shelf in able for free, name in shelf.places)
        return [name for _, name in places]

    def _is_worker(self, name: str, current: EvaluationPass) -> bool:
        replica = self._pool.get(name)
        return replica is not None and replica.takes_work and _serves(replica.held, current)

    def _holds(self, held: Mapping[str, Held], current: EvaluationPass, versions: Mapping[str, int]) -> bool:
        return _serves(held, current) and self._may_play(held, versions, current.policies)

    def _within_share(self, alike: ShelfKey, num_slots: int) -> bool:
        share = self._config.share or 1.0  # of a pass that began in a process with a share
        return alike.num_evaluating + num_slots <= max(num_slots, share * alike.num_slots)

    def _fits(self, name: str, current: EvaluationPass, share: float) -> bool:
        replica = self._pool.get(name)
        return replica is not None and current.num_trajectories <= share * replica.num_slots


def _serves(held: Mapping[str, Held], current: EvaluationPass) -> bool:
    return all(policy in held for policy in current.wanted)

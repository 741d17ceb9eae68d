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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from services.common.config.data import EvaluationConfig
from services.common.config.recipe import Recipe
from services.common.config.training import UntilConfig
from services.common.errors import derived_seed
from services.common.records import Purpose, Sampling, TaskGroupOrder, Trajectory
from services.common.telemetry.metrics import RolloutKey
from services.orchestrator.buffer.assembly import RewardMeans
from services.orchestrator.buffer.buffer import RewardRules, filled_rows
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import (
    DatasetScore,
    EvaluationResult,
    compared,
    overall,
    overall_difference,
    score,
)
from services.orchestrator.members import Held, Replica, ReplicaPool
from services.orchestrator.tasks.orders import GroupNames, sampling_of
from services.orchestrator.tasks.rows import UsableRows

# --- Decides whether an evaluation has reached the threshold of ``run.until``, and when.


START = "start"
END = "end"
_STEP = "step-"


def evaluation_of(step: int) -> str:
    """The name of the evaluation that is due after a training step."""
    return f"{_STEP}{step}"


def step_of(evaluation_id: str) -> int | None:
    """The training step after which an evaluation was due, 0 for that of the start; None for any other.

    >>> step_of("step-30"), step_of("start"), step_of("asked-1")
    (30, 0, None)
    """
    if evaluation_id == START:
        return 0
    number = evaluation_id.removeprefix(_STEP)
    return int(number) if number != evaluation_id and number.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdState:
    """How far the run is from its threshold."""

    wanted: str  # "sampled reward at least 0.9, twice in a row"
    newest: float | None  # value of the newest evaluation that counts, the lowest of the policies'
    reached: bool
    step: int = 0  # the step of the evaluation that reached the threshold
    seconds: float = 0.0  # from the begin of the run to its result


class Threshold:
    """``run.until``, over the results of evaluations."""

    def __init__(
        self,
        config: UntilConfig,
        results: Mapping[str, EvaluationResult],
        policies: Sequence[str] = (),
        *,
        failed_reward: float | None = None,
    ) -> None:
        """``policies``: those with separate evaluations. ``failed_reward``: reward of a failed sample; None is 0 at the
        most."""
        self._config = config
        self._results = results
        self._policies = tuple(policies) or ("",)
        self._failed_reward = 0.0 if failed_reward is None else failed_reward
        self._known: tuple[int, ThresholdState] | None = None  # after so many results

    @classmethod
    def of(cls, recipe: Recipe, results: Mapping[str, EvaluationResult]) -> Threshold | None:
        """The threshold of a recipe; None without ``run.until``."""
        if recipe.run.until is None:
            return None
        apart = recipe.rollout.policies == "apart"
        policies = [policy for (policy, *_) in recipe.evaluation_compositions()] if apart else []
        return cls(recipe.run.until, results, policies, failed_reward=recipe.evaluation.failed_reward)

    @property
    def reached(self) -> bool:
        return self.state().reached

    def state(self) -> ThresholdState:
        """State after the finished evaluations."""
        if self._known is None or self._known[0] != len(self._results):
            self._known = len(self._results), self._state()
        return self._known[1]

    def _state(self) -> ThresholdState:
        in_a_row, newest = 0, None
        for step, results in self._finished():
            values = {policy: self._value(result) for policy, result in results.items()}
            known = [value for value in values.values() if value is not None]
            newest = min(known) if len(known) == len(values) else None
            held = all(self._holds(policy, results[policy], value) for policy, value in values.items())
            in_a_row = in_a_row + 1 if held else 0
            if in_a_row >= self._config.in_a_row:
                seconds = max(result.elapsed_s for result in results.values())
                return ThresholdState(wanted=self.wanted(), newest=newest, reached=True, step=step, seconds=seconds)
        return ThresholdState(wanted=self.wanted(), newest=newest, reached=False)

    def wanted(self) -> str:
        """The threshold in words."""
        config = self._config
        numbers = config.at_least
        if isinstance(numbers, dict):
            least = ", ".join(f"{policy} {number:g}" for policy, number in sorted(numbers.items()))
        else:
            least = f"{numbers:g}"
        of = f" of {config.dataset}" if config.dataset else ""
        row = f", {config.in_a_row} evaluations in a row" if config.in_a_row > 1 else ""
        return f"{config.evaluation} {config.metric}{of} at least {least}{row}"

    def _finished(self) -> Iterator[tuple[int, dict[str, EvaluationResult]]]:
        """By step: the results of all policies, of evaluations whose passes with this sampling are finished."""
        steps = {step_of(name.partition("/")[0]) for name in self._results}
        for step in sorted(step for step in steps if step is not None):
            begin = f"{evaluation_of(step) if step else START}/{self._config.evaluation}"
            # The pass of a lone policy has the name of all of them.
            names = {policy: f"{begin}/{policy}" if len(self._policies) > 1 else begin for policy in self._policies}
            if all(name in self._results for name in names.values()):
                yield step, {policy: self._results[name] for policy, name in names.items()}

    def _holds(self, policy: str, result: EvaluationResult, value: float | None) -> bool:
        least = self._config.threshold(policy)
        # Failed samples never pass. Below the threshold they can only lower the mean; otherwise they could raise the mean to the threshold.
        may_count = self._config.pass_at is not None or self._failed_reward < least
        return (
            value is not None
            and value >= least
            and (may_count or not any(found.failed for found in self._chosen(result)))
        )

    def _value(self, result: EvaluationResult) -> float | None:
        chosen, k = self._chosen(result), self._config.pass_at
        return entries.overall(chosen) if k is None else entries.overall_pass_at(chosen, k)

    def _chosen(self, result: EvaluationResult) -> list[DatasetScore]:
        return [found for found in result.datasets if self._config.dataset in (None, found.name)]


# --- One pass of an evaluation: the issued part, the outcomes so far, and the result. Independent of replicas and
# datasets.


def kind_of(name: str) -> str:
    """Kind of a pass, the same for all versions: its sampling, and its policy where policies play apart.

    >>> kind_of("start/greedy/model0")
    'greedy/model0'
    """
    return name.partition("/")[2]


def played_by(name: str, versions: Mapping[str, int], newest: Mapping[str, int]) -> str:
    """The versions of an evaluation in words, where they are not the one of the step that it names; else empty.

    >>> played_by("step-4/greedy", {"a": 4}, {"a": 8}), played_by("step-4/greedy", {"a": 4}, {"a": 4})
    (' (versions 4 to 8)', '')
    >>> played_by("step-4/greedy", {"a": 4, "b": 5, "frozen": 0}, {"a": 4, "b": 5, "frozen": 0})
    ' (b version 5)'
    """
    step, told = step_of(name.partition("/")[0]), []
    for policy, oldest in sorted(versions.items()):
        last = newest.get(policy, oldest)
        if oldest != last or (step is not None and oldest not in (0, step)):  # 0 also of a policy that is not trained
            words = f"version {oldest}" if oldest == last else f"versions {oldest} to {last}"
            told.append(f"{policy} {words}" if len(versions) > 1 else words)
    return f" ({', '.join(told)})" if told else ""


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
    begun: tuple[float, int] | None = field(default=None, repr=False)  # first look, and the samples resolved by then
    num_resolved: int = 0
    num_failed: int = 0
    num_opaque: int = 0
    oldest: dict[str, int] = field(default_factory=dict)  # versions seen in the outcomes
    newest: dict[str, int] = field(default_factory=dict)
    finished_at: float = 0.0  # of the newest trajectory, in seconds since the epoch
    group_ids: set[str] = field(default_factory=set)
    roles: RewardMeans = field(default_factory=RewardMeans)  # by "policy/role/attempt"

    @property
    def num_trajectories(self) -> int:
        return sum(self.samples)

    def standing(self) -> str:
        """How far the pass is, with the time left at its pace since the first call.

        >>> EvaluationPass(name="start/greedy", evaluation_id="start", wanted={}, sampling=Sampling(), samples=(1,) * 50).standing()
        'evaluation start/greedy: 0 of 50'
        """
        told = f"evaluation {self.name}: {self.num_resolved} of {self.num_trajectories}"
        if self.begun is None and self.num_issued:
            self.begun = time.monotonic(), self.num_resolved
        begun_at, before = self.begun or (0.0, self.num_resolved)
        if before == self.num_resolved:
            return told
        each_s = (time.monotonic() - begun_at) / (self.num_resolved - before)
        return f"{told}, about {each_s * (self.num_trajectories - self.num_resolved):.0f} s left"

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
        metrics = [outcome.metrics, *(sequence.metrics for sequence in outcome.sequences)]
        self.num_opaque += any(RolloutKey.REWARD_OPAQUE.value in some for some in metrics)
        self.finished_at = max(self.finished_at, outcome.finished_at)
        for sequence in outcome.sequences:
            self.roles.add(f"{sequence.policy}/{sequence.role}/{sequence.attempt}", sequence.reward)
            for segment in sequence.segments:
                if segment.is_policy:
                    policy, version = sequence.policy, segment.weight_version
                    self.oldest[policy] = min(version, self.oldest.get(policy, version))
                    self.newest[policy] = max(version, self.newest.get(policy, version))

    def result(
        self, scores: tuple[DatasetScore, ...], base: EvaluationResult | None, started_at: float
    ) -> EvaluationResult:
        """The result of the finished pass, compared with the first one of its kind (``base``)."""
        pinned = bool(self.pinned)
        return EvaluationResult(
            name=self.name,
            versions=dict(self.versions if pinned else self.oldest or self.wanted),
            newest_versions=dict(self.versions if pinned else self.newest or self.wanted),
            pinned=pinned,
            mean_reward=overall(scores),
            num_trajectories=self.num_trajectories,
            num_failed=self.num_failed,
            num_opaque=self.num_opaque,
            datasets=compared(base.datasets, scores) if base is not None else scores,
            compared_with=base.name if base is not None else "",
            difference=overall_difference(base.datasets, scores) if base is not None else None,
            roles=self.roles.means(),
            elapsed_s=max(0.0, self.finished_at - started_at),
        )


class Evaluations:
    def __init__(
        self,
        recipe: Recipe,
        sources: Mapping[str, UsableRows],
        names: GroupNames,
        rules: RewardRules,
        on_result: Callable[[EvaluationResult], None],
        started_at: float,
    ) -> None:
        """``started_at``: when the run began."""
        config = self._config = recipe.evaluation
        self._rules = rules
        self._sources = dict(sources)
        sections = recipe.data.evaluation.items()
        self._samples = {name: data.samples_per_task or config.samples_per_task for name, data in sections}
        self.rows = [(name, row) for name, source in self._sources.items() for row in range(len(source))]
        self._names = names
        self._timeout_s = recipe.rollout.timeout_s
        self._seed = recipe.run.seed
        self._on_result = on_result
        self._started_at = started_at
        self._compositions = (
            recipe.evaluation_compositions()
        )  # policies that are evaluated together, each in its own pass
        self._digests = {name: _digest(source, range(len(source))) for name, source in self._sources.items()}
        self.passes: dict[str, EvaluationPass] = {}  # unfinished ones, in order
        self.results: dict[str, EvaluationResult] = {}

    def kinds(self, evaluation_id: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """(name of the pass, name of its sampling, its policies) of all passes."""
        apart = len(self._compositions) > 1
        during = self._config.during_samplings if step_of(evaluation_id) else []
        return [
            (f"{evaluation_id}/{sampling}" + (f"/{policies[0]}" if apart else ""), sampling, policies)
            for policies in self._compositions
            for sampling in self._config.samplings
            if not during or sampling in during
        ]

    def _samples_of(self, evaluation_id: str) -> tuple[int, ...]:
        """Samples by row; 0 for a row that the evaluation of a training step leaves out: it plays the next ones of a fixed
        random order."""
        step, most = step_of(evaluation_id), self._config.during_tasks
        chosen = set(self.rows)
        if step and most is not None:
            chosen = set()
            begin = (step // max(1, self._config.every) - 1) * most
            for name, source in self._sources.items():
                order = list(range(len(source)))
                random.Random(derived_seed(self._seed, "evaluation order", name)).shuffle(order)
                chosen |= {(name, order[(begin + i) % len(order)]) for i in range(min(most, len(order)))}
        return tuple(self._samples[row[0]] if row in chosen else 0 for row in self.rows)

    def begin(self, evaluation_id: str, versions: Mapping[str, int]) -> None:
        """Queue the passes of an evaluation, except those already queued or finished."""
        if not self.rows:
            return
        for name, sampling, policies in self.kinds(evaluation_id):
            if name not in self.passes and name not in self.results:
                self.passes[name] = EvaluationPass(
                    name=name,
                    evaluation_id=evaluation_id,
                    wanted={policy: versions[policy] for policy in policies or versions},
                    sampling=sampling_of(self._config.samplings[sampling]),
                    samples=self._samples_of(evaluation_id),
                    policies=policies,
                )

    def skip(self, which: Callable[[EvaluationPass], bool]) -> list[EvaluationPass]:
        """Forget the unfinished passes of training steps that ``which`` chooses, and return them."""
        chosen = [p.name for p in self.passes.values() if step_of(p.evaluation_id) and which(p)]
        return [self.passes.pop(name) for name in chosen]

    def newest_step(self) -> int:
        """The newest training step with an evaluation, begun or finished; 0 before the first."""
        names = [*self.results, *self.passes]
        return max((step_of(name.partition("/")[0]) or 0 for name in names), default=0)

    def finished(self, evaluation_id: str) -> bool:
        return all(name in self.results for name, _, _ in self.kinds(evaluation_id))

    def has_room(self, current: EvaluationPass) -> bool:
        """Whether ``evaluation.max_in_flight`` admits the next task group of a pass."""
        limit = self._config.max_in_flight
        in_flight = sum(other.num_issued - other.num_resolved for other in self.passes.values())
        return limit is None or in_flight + current.next_samples <= limit

    def draw(self, current: EvaluationPass) -> TaskGroup:
        """The next task group of a pass with unissued groups; its replicas are decided by now."""
        assert current.pinned is not None
        assert current.has_left
        row = current.next_row
        current.next_row += 1
        dataset, place = self.rows[row]
        order = TaskGroupOrder(
            task_group_id=self._names.draw(),
            task=self._sources[dataset][place],
            indices=tuple(range(current.samples[row])),
            purpose=Purpose.EVALUATION,
            source=dataset,
            sampling=current.sampling,
            required_versions=dict(current.versions) if current.pinned else {},
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
        current = self.passes.get(group.evaluation)
        if current is None:
            return
        current.issued_rows.add(group.position)
        current.issue(group.id, group.position)
        current.versions = group.order.required_versions
        current.pinned = bool(group.order.required_versions)

    def resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """Count the outcome of a slot of an evaluation's group."""
        current = self.passes.get(group.evaluation)
        if current is None:
            return
        reward = self._rules.outcome_reward(outcome)
        if reward is None and not isinstance(outcome, Trajectory):
            reward = self._config.failed_reward
        current.note(outcome, reward, group.position)
        if current.finished:
            del self.passes[current.name]
            same = [other for other in self.results.values() if kind_of(other.name) == kind_of(current.name)]
            base = next((other for other in same if other.mean_reward is not None), None)
            result = current.result(tuple(self._scores(current)), base, self._started_at)
            self.results[current.name] = result
            self._on_result(result)

    def _scores(self, current: EvaluationPass) -> Iterator[DatasetScore]:
        for name, source in self._sources.items():
            rows = [row for row, (dataset, _) in enumerate(self.rows) if dataset == name and current.samples[row]]
            places = [self.rows[row][1] for row in rows]
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
        self.passes.pop(result.name, None)
        self.results[result.name] = result

    def known(self, evaluation_id: str) -> bool:
        return any(name in self.passes or name in self.results for name, _, _ in self.kinds(evaluation_id))

    def group_ids(self) -> set[str]:
        """Task groups of unfinished passes: the pass needs their rewards until its result."""
        return {name for current in self.passes.values() for name in current.group_ids}

    def unissued(self, gone: Callable[[Mapping[str, int]], bool]) -> list[TaskGroup]:
        """All unissued groups of pinned passes whose versions are ``gone``; the caller fails them."""
        groups: list[TaskGroup] = []
        for current in self.passes.values():
            if current.pinned and gone(current.versions):
                while current.has_left:
                    groups.append(self.draw(current))
        return groups


def _digest(source: UsableRows, places: Iterable[int]) -> str:
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
            holders = self._workers(current, lambda replica: self._holds(replica, current, current.versions))
            current.evaluators = self._first(holders)
        return ""

    def repeats_the_end(self, current: EvaluationPass) -> bool:
        """Whether a pass, after training, would be played by the newest versions."""
        return not self.may_come(current) if current.pinned is None else not current.pinned or self._is_newest(current)

    def _is_newest(self, current: EvaluationPass) -> bool:
        return all(number >= self._newest(policy) for policy, number in current.versions.items())

    def may_come(self, current: EvaluationPass) -> bool:
        """Whether a replica holds the requested versions or older ones, so that they may still be evaluated."""
        return any(
            all(replica.held[policy].number <= number for policy, number in current.wanted.items())
            for replica in self._workers(current)
        )

    def freest(self, current: EvaluationPass, num_slots: int) -> Replica | None:
        """The replica for the next task group of this pass, with the most free slots of those that can."""
        required = current.versions if current.pinned else {}

        def serves(replica: Replica) -> bool:
            if current.evaluators:
                chosen = replica.replica_id in current.evaluators
            else:
                share = self._config.share or 1.0  # of a pass that began in a process with a share
                most = max(num_slots, share * replica.num_slots)
                chosen = bool(current.pinned) or replica.num_evaluating + num_slots <= most
            return chosen and self._holds(replica, current, required)

        return self._pool.freest(num_slots, serves)

    def reserved(self) -> frozenset[str]:
        """Replicas without training groups, because an evaluation has tasks for them that may begin."""
        waiting = (
            current
            for current in self._evaluations.passes.values()
            if current.has_left and self._evaluations.has_room(current)
        )
        return frozenset().union(*(current.evaluators for current in waiting))

    def pinned_version(self, replica: Replica, policy: str) -> int | None:
        """The version that the replica keeps for an evaluation, also between two of its tasks."""
        for current in self._evaluations.passes.values():
            if current.pinned and replica.replica_id in current.evaluators and current.has_left:
                return current.versions.get(policy)
        return replica.pinned_version(policy)

    def awaited_version(self, replica: Replica, policy: str) -> int | None:
        """The least version that an evaluation awaits on the replica, if any."""
        for current in self._evaluations.passes.values():
            if replica.replica_id in current.awaited and current.has_left:
                return current.wanted.get(policy)
        return None

    def _choose(self, current: EvaluationPass, training: bool) -> str:
        able = self._workers(current)
        share = self._config.share if training else None
        fits = any(current.num_trajectories <= (share or 1.0) * replica.num_slots for replica in able)
        if len(able) <= self._config.engines and share and not fits:
            current.pinned, current.versions, current.awaited = False, current.wanted, frozenset()
            return ""
        policies = tuple(current.wanted)
        ready = [
            replica
            for replica in able
            if self._may_play(replica.held, {}, policies)
            and all(replica.held[policy].number >= number for policy, number in current.wanted.items())
            and not any(policy in replica.moving for policy in policies)  # it would leave its held version
        ]
        if not ready:
            # With versions that follow each other faster than they are fetched, no replica would ever stand still.
            if current.awaited.isdisjoint(replica.replica_id for replica in able):
                current.awaited = self._first(able)
            return "no replica holds the version to evaluate yet"
        current.awaited = frozenset()
        nearest = min(ready, key=lambda replica: sum(replica.held[policy].number for policy in policies))
        current.versions = {policy: nearest.held[policy].number for policy in policies}
        alike = [replica for replica in ready if self._may_play(replica.held, current.versions, policies)]
        current.pinned, current.evaluators = True, self._first(alike)
        return ""

    def _first(self, replicas: list[Replica]) -> frozenset[str]:
        """As many of these as evaluate at once."""
        return frozenset(replica.replica_id for replica in replicas[: self._config.engines])

    def _adopt_sibling(self, current: EvaluationPass) -> bool:
        """Adopt versions and replicas of another pass of the same evaluation and policies; False without a decided one."""
        for other in self._evaluations.passes.values():
            same = other.evaluation_id == current.evaluation_id and other.policies == current.policies
            if other is not current and same and other.pinned is not None:
                current.pinned, current.versions, current.evaluators = other.pinned, other.versions, other.evaluators
                return True
        return False

    def _workers(
        self, current: EvaluationPass, serves: Callable[[Replica], bool] = lambda replica: True
    ) -> list[Replica]:
        """Replicas that take work, hold all policies of the pass and ``serves``: freest first, then by id."""
        able = [r for r in self._pool.workers() if all(policy in r.held for policy in current.wanted) and serves(r)]
        return sorted(able, key=lambda replica: (-replica.num_free, replica.replica_id))

    def _holds(self, replica: Replica, current: EvaluationPass, versions: Mapping[str, int]) -> bool:
        held = replica.held
        return all(policy in held for policy in current.wanted) and self._may_play(held, versions, current.policies)

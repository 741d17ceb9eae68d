"""The asynchronous ring in virtual time: replica, orchestrator's experience and trainer in one thread, deterministic.

    admission open --task group--> player (a token per tick, tool calls of a long-tailed latency)
        --trajectories--> Experience: groups, filter, buffer --late rule, batch--> trainer step (a constant number of
        ticks) --version--> player, between two ticks: running rollouts go on under the new weights

Admission, buffer, late rule, batch assembly, sampling and training are the real ones; time is counted in ticks, one
decoding step each. So staleness arises as in a run, and the same settings and seed give the same curve. A tool call
takes ``Tail.short_ticks`` times a Pareto draw, for multiplications ``Tail.long_ticks``: long rollouts are of one kind,
which only they can teach. Shared by the scripts of this folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks._virtual_player import POLICY, Latency, mean_reward, operator_of, seed_of
from benchmarks._virtual_training import World, rank_batch, slots_of
from services.common.records import TOO_OLD, RankBatch, RolloutFailure, Task, Trajectory
from services.orchestrator.buffer.batches import ExperiencePipeline, LateGroups
from services.orchestrator.groups import Outcome, TaskGroup

LONG = "times"  # the operator whose tool calls take long
NUM_EVALUATED = 192
_MOST_TICKS_PER_STEP = 5_000  # a step that takes longer will never come


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Latency of a tool call in ticks: a scale by kind of problem, times a Pareto draw of at least 1."""

    short_ticks: float = 2.0
    long_ticks: float = 40.0
    alpha: float = 1.6
    longest: float = 10.0  # times the scale: the tool's own time limit

    def latency(self) -> Latency:
        def ticks(task: Task, seed: int) -> int:
            scale = self.long_ticks if operator_of(task.data) == LONG else self.short_ticks
            uniform = (seed_of(seed, "latency") + 1) / 2**63
            return round(scale * min(uniform ** (-1 / self.alpha), self.longest))

        return ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the two sides are."""

    train_ticks: int = 24  # of one training step
    num_slots: int = 192  # rollouts played at once
    evaluate_every: int = 4  # versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation on held-out problems, each sampled once with common random numbers and without latency."""

    version: int
    ticks: int
    reward_short: float
    reward_long: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCurve:
    """One run of the ring."""

    points: tuple[Point, ...]
    ticks: int  # of the whole run
    num_played: int  # rollouts that ended by themselves
    num_cancelled: int
    num_trained: int  # sequences in batches
    num_long_played: int  # of these, rollouts of the kind that takes long
    num_long_trained: int
    tokens_played: int
    tokens_trained: int
    ages: tuple[int, ...]  # number of trained tokens by age in versions
    trainer_busy_share: float  # of the ticks


class VirtualRing:
    """One run. ``run`` may be called once."""

    def __init__(self, world: World, seed: int, tail: Tail, pace: Pace) -> None:
        self._world = world
        self._seed = seed
        self._pace = pace
        self._trainer = world.trainer()
        self._player = world.player(pace.num_slots, tail.latency())
        self._judge = world.player(NUM_EVALUATED)
        self._counters: Counter[str] = Counter()
        self._experience = ExperiencePipeline({POLICY: world.batch}, world.recipe.run.steps, self._counters)
        self._late = LateGroups(POLICY, world.batch, self._experience, clock=lambda: float(self._player.now))
        self._late.cancel = self._cancel
        self._groups: dict[str, TaskGroup] = {}  # with open slots
        self._position = 0
        self._version = 0
        self._began_at = 0  # tick at which the newest step began
        self._published_at = 0  # tick of the newest version
        self._training: tuple[int, int] | None = None  # (step, tick at which it is done)
        self._busy_ticks = 0
        self._points: list[Point] = []
        self._played: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._ages: Counter[int] = Counter()

    def run(self) -> RingCurve:
        """Train ``recipe.run.steps`` steps."""
        self._experience.advanced(POLICY, 0)
        self._evaluate()
        while self._version < self._world.recipe.run.steps:
            self._issue()
            self._take_in(self._player.tick())
            self._train()
            self._publish()
            if self._player.now - self._published_at > _MOST_TICKS_PER_STEP:
                raise RuntimeError(f"step {self._version + 1} is not done after {_MOST_TICKS_PER_STEP} ticks")
        now = self._player.now
        return RingCurve(
            points=tuple(self._points),
            ticks=now,
            num_played=self._played["all"],
            num_cancelled=self._played["cancelled"],
            num_trained=self._trained["all"],
            num_long_played=self._played[LONG],
            num_long_trained=self._trained[LONG],
            tokens_played=self._played["tokens"],
            tokens_trained=self._trained["tokens"],
            ages=tuple(self._ages[age] for age in range(max(self._ages) + 1)),
            trainer_busy_share=self._busy_ticks / now,
        )

    def _issue(self) -> None:
        size = self._world.recipe.rollout.group_size
        while self._player.num_playing + size <= self._pace.num_slots and self._experience.admission.open((POLICY,)):
            group = self._world.group(self._position, self._seed)
            self._position += 1
            group.born = {POLICY: self._player.version}
            self._groups[group.id] = group
            self._experience.issued(group)
            for slot in slots_of(group):
                self._player.start(slot)

    def _take_in(self, trajectories: Seq[Trajectory]) -> None:
        for trajectory in trajectories:
            group = self._groups[trajectory.task_group_id]
            self._note(self._played, operator_of(group.order.task.data), trajectory.sequences[0].num_trained_tokens)
            self._resolve(group, trajectory)

    def _resolve(self, group: TaskGroup, outcome: Outcome) -> None:
        group.resolve(outcome)
        self._experience.resolved(group, outcome)
        if group.complete:
            del self._groups[group.id]

    def _cancel(self, groups: Seq[TaskGroup]) -> None:
        """End the open slots of groups that could only be dropped."""
        for group in groups:
            for index in group.unresolved:
                self._player.cancel(group.id, index)
                self._played["cancelled"] += 1
                self._resolve(group, RolloutFailure(task_group_id=group.id, index=index, reason=TOO_OLD))

    def _train(self) -> None:
        step = self._version + 1
        if self._training is not None or not self._experience.buffers[POLICY].ready or not self._late.settled():
            return
        groups, _ = self._experience.take_batch(POLICY, step)
        self._late.taken()
        self._began_at = self._player.now
        batch = rank_batch(step, groups, self._world.batch.minibatches)
        self._experience.batch_recorded(groups)
        self._note_batch(batch)
        self._trainer.run(batch)  # the player has its own copy of the weights until the step is done in virtual time
        self._training = step, self._player.now + self._pace.train_ticks
        self._busy_ticks += self._pace.train_ticks

    def _publish(self) -> None:
        if self._training is None or self._player.now < self._training[1]:
            return
        self._published_at = self._player.now
        self._version, self._training = self._training[0], None
        self._late.step_s = float(self._player.now - self._began_at)
        self._experience.advanced(POLICY, self._version)
        self._player.update(self._trainer.model.causal_lm, self._version)
        if self._version % self._pace.evaluate_every == 0 or self._version == self._world.recipe.run.steps:
            self._evaluate()

    def _evaluate(self) -> None:
        self._judge.update(self._trainer.model.causal_lm, self._version)
        played = self._world.evaluate(self._judge, greedy=False, num_tasks=NUM_EVALUATED)
        kinds = [operator_of(task.data) for task in self._world.held_out[:NUM_EVALUATED]]
        by_kind: dict[bool, list[Trajectory]] = {True: [], False: []}
        for kind, trajectory in zip(kinds, played, strict=True):
            by_kind[kind == LONG].append(trajectory)
        self._points.append(
            Point(
                version=self._version,
                ticks=self._player.now,
                reward_short=mean_reward(by_kind[False]),
                reward_long=mean_reward(by_kind[True]),
            )
        )

    def _note_batch(self, batch: RankBatch) -> None:
        for item in batch.sequences:
            position = int(item.sequence_id.split("/")[0].removeprefix("g"))
            kind = operator_of(self._world.group(position, self._seed).order.task.data)
            self._note(self._trained, kind, item.sequence.num_trained_tokens)
            for segment in item.sequence.segments:
                if segment.is_policy:
                    self._ages[batch.training_step - 1 - segment.weight_version] += segment.num_tokens

    @staticmethod
    def _note(counter: Counter[str], kind: str, num_tokens: int) -> None:
        counter["all"] += 1
        counter[kind] += 1
        counter["tokens"] += num_tokens

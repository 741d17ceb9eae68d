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

import random
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks._virtual_player import POLICY, Latency, Slot, VirtualPlayer, at_once, mean_reward, operator_of, seed_of
from recipes.quickstart.task import problems
from services.common.config.recipe import Recipe
from services.common.records import (
    TOO_OLD,
    Purpose,
    RankBatch,
    RolloutFailure,
    Sampling,
    Task,
    TaskGroupOrder,
    Trajectory,
)
from services.common.text.chat import Chat, load_tokenizer
from services.inference.workflows.tools import ToolUse, ToolUseSettings
from services.orchestrator.buffer.assembly import Batch, assemble
from services.orchestrator.buffer.batches import ExperiencePipeline, LateGroups
from services.orchestrator.buffer.buffer import AdvantageGroup, RewardRules
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.tasks.orders import sampling_of
from services.trainer.app import build_step
from services.trainer.metrics import StepMetrics
from services.trainer.ranks import Ranks

# --- Training in one process at a controlled staleness: the real player, groups, batch assembly and trainer step.


NUM_HELD_OUT = 256  # problems of an evaluation, the same for every run


class World:
    """Shared by the runs of one recipe: its starting checkpoint, workflow, problems, and how players are built."""

    def __init__(self, recipe: Recipe, checkpoint: Path) -> None:
        self.recipe = recipe
        self.checkpoint = str(checkpoint)
        self.chat = Chat(load_tokenizer(checkpoint))
        # The gateway's name for a reward: the function itself would be run in a thread.
        settings = {**recipe.workflow.settings, "reward": "boxed"}
        self.workflow = ToolUse(ToolUseSettings.model_validate(settings))
        self.batch = recipe.policies[POLICY].batch

    def player(self, num_slots: int, latency: Latency = at_once) -> VirtualPlayer:
        context_length = self.recipe.policies[POLICY].model.context_length
        return VirtualPlayer(
            self.checkpoint,
            self.workflow,
            self.chat,
            num_slots=num_slots,
            context_length=context_length,
            latency=latency,
        )

    def trainer(self) -> Any:
        """A trainer step at the starting checkpoint."""
        torch.set_num_threads(self.recipe.policies[POLICY].trainer.threads)
        return build_step(self.recipe, POLICY, self.checkpoint, Ranks.single())[0]

    @cached_property
    def sampling(self) -> Sampling:
        return sampling_of(self.recipe.sampling)

    @cached_property
    def held_out(self) -> list[Task]:
        rows = list(problems(0, split="held_out"))
        random.Random(0).shuffle(rows)
        return [Task(task_id=row["id"], data=row) for row in rows]

    def group(self, position: int, seed: int) -> TaskGroup:
        """The task group at a place of the order that a seed gives; problems come round again."""
        rows = _training_rows(seed)
        row = rows[position % len(rows)]
        order = TaskGroupOrder(
            task_group_id=f"g{position:06d}",
            task=Task(task_id=row["id"], data=row),
            indices=tuple(range(self.recipe.rollout.group_size)),
            purpose=Purpose.TRAIN,
            sampling=self.sampling,
            seed=seed_of(seed, f"group {position}"),
        )
        return TaskGroup(order=order, position=position)

    def evaluate(self, player: VirtualPlayer, greedy: bool, num_tasks: int = NUM_HELD_OUT) -> list[Trajectory]:
        """One rollout of each of the first held-out problems, sampled with common random numbers."""
        sampling = Sampling(temperature=0.0, max_new_tokens=self.sampling.max_new_tokens) if greedy else self.sampling
        tasks = self.held_out[:num_tasks]
        name = "greedy" if greedy else "sampled"
        return player.play(
            [Slot(f"{name}-{i}", 0, task, sampling, seed_of(0, f"held out {i}")) for i, task in enumerate(tasks)]
        )


@lru_cache(maxsize=4)
def _training_rows(seed: int) -> list[dict[str, Any]]:
    return list(islice(problems(seed), 20_000))


def slots_of(group: TaskGroup) -> list[Slot]:
    order = group.order
    return [
        Slot(group.id, index, order.task, order.sampling, seed_of(order.seed, str(index))) for index in order.indices
    ]


def rank_batch(training_step: int, groups: Seq[AdvantageGroup], num_minibatches: int) -> RankBatch:
    """The whole batch of a training step, for a trainer of one rank."""
    record, sequences = assemble(POLICY, training_step, groups, num_minibatches, {})
    return Batch(record=record, sequences=sequences, replayed=False).share(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training run."""

    sampled: tuple[float, ...]  # mean reward of what each version played, from version 0 on
    steps: tuple[StepMetrics, ...]
    ages: tuple[tuple[int, int], ...]  # of the trained tokens of each step: youngest and oldest, in versions
    final_greedy: float  # on held-out problems, by the last version
    final_sampled: float


def train_at_staleness(world: World, staleness: int, seed: int) -> Curve:
    """Train ``recipe.run.steps`` steps on batches that are ``staleness`` versions old."""
    num_groups = -(-world.batch.size // world.recipe.rollout.group_size)
    trainer = world.trainer()
    player = world.player(num_slots=max(num_groups * world.recipe.rollout.group_size, NUM_HELD_OUT))
    waiting: deque[list[AdvantageGroup]] = deque()
    sampled: list[float] = []
    metrics: list[StepMetrics] = []
    ages: list[tuple[int, int]] = []
    position = 0
    for version in range(world.recipe.run.steps + 1):
        if version:
            batch = rank_batch(version, waiting.popleft(), world.batch.minibatches)
            ages.append(_ages(batch))
            metrics.append(trainer.run(batch))
            player.update(trainer.model.causal_lm, version)
        rewards: list[float] = []
        for _ in range(1 if version else staleness + 1):
            groups = [world.group(position + i, seed) for i in range(num_groups)]
            position += num_groups
            waiting.append(_played(player, groups))
            rewards += [m.sequence.reward for group in waiting[-1] for m in group.members]
        sampled.append(sum(rewards) / len(rewards))
    return Curve(
        sampled=tuple(sampled),
        steps=tuple(metrics),
        ages=tuple(ages),
        final_greedy=mean_reward(world.evaluate(player, greedy=True)),
        final_sampled=mean_reward(world.evaluate(player, greedy=False)),
    )


def _played(player: VirtualPlayer, groups: Seq[TaskGroup]) -> list[AdvantageGroup]:
    by_id = {group.id: group for group in groups}
    for trajectory in player.play([slot for group in groups for slot in slots_of(group)]):
        by_id[trajectory.task_group_id].resolve(trajectory)
    return [found for group in groups for found in RewardRules().groups(group)]


def _ages(batch: RankBatch) -> tuple[int, int]:
    versions = [s.weight_version for item in batch.sequences for s in item.sequence.segments if s.is_policy]
    return batch.training_step - 1 - max(versions), batch.training_step - 1 - min(versions)


# --- The benchmark itself.


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

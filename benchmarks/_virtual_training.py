"""Training in one process at a controlled staleness: the real player, groups, batch assembly and trainer step.

    version v --plays--> the groups of batch v + s + 1 --advantage groups, assembly--> training step --> version v + 1

The batch of step k is sampled by version max(0, k - 1 - s): every trained token is exactly s versions old once there are
such versions (the controlled design of M2PO, arXiv 2510.01161). Version 0 therefore plays s + 1 batches. Deterministic on
a CPU: the same settings and seed give the same bits. Shared by the scripts of this folder.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks._virtual_player import POLICY, Latency, Slot, VirtualPlayer, at_once, mean_reward, seed_of
from recipes.quickstart.task import problems
from services.common.config.recipe import Recipe
from services.common.records import Purpose, RankBatch, Sampling, Task, TaskGroupOrder, Trajectory
from services.common.text.chat import Chat, load_tokenizer
from services.inference.workflows.tools import ToolUse, ToolUseSettings
from services.orchestrator.buffer.assembly import Batch, assemble
from services.orchestrator.buffer.buffer import AdvantageGroup, advantage_groups
from services.orchestrator.groups import TaskGroup
from services.orchestrator.tasks.orders import sampling_of
from services.trainer.app import build_step
from services.trainer.metrics import StepMetrics
from services.trainer.ranks import Ranks

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
    return [found for group in groups for found in advantage_groups(group)]


def _ages(batch: RankBatch) -> tuple[int, int]:
    versions = [s.weight_version for item in batch.sequences for s in item.sequence.segments if s.is_policy]
    return batch.training_step - 1 - max(versions), batch.training_step - 1 - min(versions)

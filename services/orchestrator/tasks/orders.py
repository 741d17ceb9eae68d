"""Creates task groups: their order, names, tasks, seeds and sampling. Independent of the time of issue and the replica."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.common.config.data import DataConfig, SamplingConfig, name_of
from services.common.config.recipe import Recipe
from services.common.errors import derived_seed
from services.common.records import Purpose, Sampling, TaskGroupOrder
from services.common.telemetry.metrics import StepKey
from services.orchestrator.groups import TaskGroup
from services.orchestrator.tasks.rows import UsableRows

# --- Chooses the prompts to train on from the rewards of earlier task groups of the same prompt.


Kind = Literal["easy", "hard"]


class Curation(abc.ABC):
    """One call of ``accepts`` per position of the curriculum, one of ``observe`` per group of a prompt."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._num_skipped = 0

    @abc.abstractmethod
    def chance(self, row: int) -> float:
        """With which a prompt is played."""

    def accepts(self, row: int, position: int) -> bool:
        """Whether a prompt is played: a draw by position, independent of the number of draws before a restart."""
        chance = self.chance(row)
        accepted = chance >= 1.0 or float(np.random.default_rng([self._seed, position]).random()) < chance
        self._num_skipped += not accepted
        return accepted

    @abc.abstractmethod
    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Take the rewards of a group of a prompt; none where all of its rollouts failed."""

    def advanced(self) -> None:  # noqa: B027 - most take no notice
        """Note a published version."""

    @abc.abstractmethod
    def gauges(self) -> dict[str, float]: ...


def build_curation(config: DataConfig, seed: int) -> Curation | None:
    """The curation that ``data.curation`` names; None for one that accepts every prompt."""
    if config.curation == "filter_solved":
        return FilterSolved(seed, config.solved_reward, config.revisit_solved)
    if config.curation == "pass_rate":
        return PassRate(seed, config.pass_rate, config.solved_reward, config.revisit_solved)
    return Greso(seed) if config.curation == "greso" else None


class FilterSolved(Curation):
    """Skips a prompt while a decaying average of its share of successes, from 0, is at ``LIMIT`` or above.

    A prompt leaves after 29 solved groups in a row (1 - 0.9 ** 29 >= 0.95). A solved prompt is still played with the
    chance ``revisit``, and comes back when it is no longer solved.
    """

    DECAY, LIMIT = 0.9, 0.95

    def __init__(self, seed: int, solved_reward: float = 1.0, revisit: float = 0.0) -> None:
        super().__init__(seed)
        self._solved_reward = solved_reward
        self._revisit = revisit
        self._average: dict[int, float] = {}

    def chance(self, row: int) -> float:
        return self._revisit if self._average.get(row, 0.0) >= self.LIMIT else 1.0

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if rewards:
            share = sum(reward >= self._solved_reward for reward in rewards) / len(rewards)
            self._average[row] = self.DECAY * self._average.get(row, 0.0) + (1 - self.DECAY) * share

    def gauges(self) -> dict[str, float]:
        solved = sum(average >= self.LIMIT for average in self._average.values())
        return {StepKey.CURATION_SKIPPED.value: float(self._num_skipped), StepKey.CURATION_SOLVED.value: float(solved)}


class PassRate(Curation):
    """Skips a prompt while its share of successes, over its last ``NUM_GROUPS`` groups, is outside of ``band``.

    A prompt with fewer groups is played. One above or below the band is still played with the chance ``revisit_solved`` or
    ``REVISIT_UNSOLVED``; its newest groups then count, so it can come back. Groups whose rollouts all failed do not count.
    """

    NUM_GROUPS, REVISIT_UNSOLVED = 2, 0.1

    def __init__(
        self, seed: int, band: tuple[float, float], solved_reward: float = 1.0, revisit_solved: float = 0.0
    ) -> None:
        super().__init__(seed)
        self._band = band
        self._solved_reward = solved_reward
        self._chances: dict[Kind | None, float] = {"easy": revisit_solved, "hard": self.REVISIT_UNSOLVED, None: 1.0}
        self._counts: dict[int, list[tuple[int, int]]] = {}  # row -> (successes, rollouts) of its last groups

    def outside(self, row: int) -> Kind | None:
        """On which side of the band a prompt is; None for one to play."""
        counts = self._counts.get(row, ())
        if len(counts) < self.NUM_GROUPS:
            return None
        rate = sum(solved for solved, _ in counts) / sum(count for _, count in counts)
        low, high = self._band
        return None if low <= rate <= high else "hard" if rate < low else "easy"

    def chance(self, row: int) -> float:
        return self._chances[self.outside(row)]

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if rewards:
            counts = self._counts.setdefault(row, [])
            counts.append((sum(reward >= self._solved_reward for reward in rewards), len(rewards)))
            del counts[: -self.NUM_GROUPS]

    def gauges(self) -> dict[str, float]:
        sides = Counter(map(self.outside, self._counts))
        return {
            StepKey.CURATION_SKIPPED.value: float(self._num_skipped),
            StepKey.CURATION_SOLVED.value: float(sides["easy"]),
            StepKey.CURATION_UNSOLVED.value: float(sides["hard"]),
        }


class Greso(Curation):
    """A prompt with a streak of z equal-reward groups is played with probability max(p_kind ** z, floor_kind).

    The kinds are easy (mean reward above 0.5) and hard; p moves by ``STEP`` with every version.
    """

    START, STEP, LOWEST, HIGHEST = 0.5, 0.01, 0.01, 0.99
    TARGETS: Mapping[Kind, float] = {"easy": 0.083, "hard": 0.167}
    FLOORS: Mapping[Kind, float] = {"easy": 0.05, "hard": 0.30}

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.p: dict[Kind, float] = {"easy": self.START, "hard": self.START}
        self._streaks: dict[
            int, tuple[int, Kind]
        ] = {}  # groups of a prompt with equal rewards in a row, kind of the last
        self._seen: Counter[str] = Counter()  # since the last version

    def chance(self, row: int) -> float:
        length, kind = self._streaks.get(row, (0, "easy"))
        return max(self.p[kind] ** length, self.FLOORS[kind])

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if len(rewards) < 2:
            return
        self._seen["groups"] += 1
        if any(reward != rewards[0] for reward in rewards):
            self._streaks.pop(row, None)
            return
        kind: Kind = "easy" if rewards[0] > 0.5 else "hard"
        self._streaks[row] = self._streaks.get(row, (0, kind))[0] + 1, kind
        self._seen[kind] += 1

    def advanced(self) -> None:
        groups = self._seen["groups"]
        if groups:
            for kind, target in self.TARGETS.items():
                # Too many such groups: play fewer prompts that bring them.
                move = -self.STEP if self._seen[kind] / groups > target else self.STEP
                self.p[kind] = min(max(self.p[kind] + move, self.LOWEST), self.HIGHEST)
        self._seen.clear()

    def gauges(self) -> dict[str, float]:
        return {
            StepKey.CURATION_SKIPPED.value: float(self._num_skipped),
            "greso_p_easy": self.p["easy"],
            "greso_p_hard": self.p["hard"],
        }


class Curriculum:
    """Maps a position, counted from 0 over all passes, to a row number.

    >>> sorted(Curriculum(3, seed=1).row(position) for position in range(3))
    [0, 1, 2]
    """

    def __init__(self, num_tasks: int, seed: int, shuffle: bool = True) -> None:
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; a curriculum needs at least one task")
        self.num_tasks = num_tasks
        self._seed = seed
        self._shuffle = shuffle
        self._pass_number = -1
        self._order: npt.NDArray[np.int64] = np.arange(num_tasks)

    def row(self, position: int) -> int:
        """The row at a position; the same for ever, given number of tasks and seed."""
        pass_number, offset = divmod(position, self.num_tasks)
        if not self._shuffle:
            return offset
        if pass_number != self._pass_number:
            self._order = np.random.default_rng([self._seed, pass_number]).permutation(self.num_tasks)
            self._pass_number = pass_number
        return int(self._order[offset])


MOST_DIGITS = 18


class GroupNames:
    """Names ``<mark of the run>-<number>``: counted up, so a name tells whether the run has issued that group."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._next = 1

    def draw(self) -> str:
        name = f"{self._mark}-{self._next:08d}"
        self._next += 1
        return name

    def resume_after(self, name: str) -> None:
        number = self._number(name)
        if number is not None:
            self._next = max(self._next, number + 1)

    def skip(self, count: int) -> None:
        """Skip names that may have been drawn."""
        self._next += count

    def was_issued(self, name: str) -> bool:
        number = self._number(name)
        return number is not None and 0 < number < self._next

    def _number(self, name: str) -> int | None:
        mark, _, number = name.rpartition("-")
        is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
        return int(number) if mark == self._mark and is_number else None


def sampling_of(config: SamplingConfig) -> Sampling:
    return Sampling(**config.model_dump())


@dataclass(slots=True)
class Stream:
    """The tasks of one source, in the order in which they are issued."""

    tasks: UsableRows
    curriculum: Curriculum
    curation: Curation | None = None
    next_position: int = 0
    nothing_to_play: bool = False  # the curation refused a whole pass, so refused tasks are played

    def draw(self) -> tuple[int, int]:
        """The next accepted (position, row); after a whole refused pass, the last one."""
        for _ in range(self.curriculum.num_tasks):
            position = self.next_position
            self.next_position += 1
            row = self.curriculum.row(position)
            self.nothing_to_play = self.curation is not None and not self.curation.accepts(row, position)
            if not self.nothing_to_play:
                break
        return position, row


class TrainingOrders:
    """Creates training task groups, those of each source in its curriculum's order."""

    def __init__(
        self,
        recipe: Recipe,
        tasks: Mapping[str, UsableRows],
        names: GroupNames,
    ) -> None:
        """``tasks``: by name of the source, the only one without a name."""
        self._names = names
        self._seed = seed = recipe.run.seed
        self.streams: dict[str, Stream] = {}
        for section, config in recipe.data.training.items():
            source = name_of(section)
            curriculum = Curriculum(len(tasks[source]), recipe.data.seed_of(section, seed), config.shuffle)
            own_seed = derived_seed(seed, "curation", source) if source else seed
            self.streams[source] = Stream(tasks[source], curriculum, build_curation(recipe.data, own_seed))
        self._curations = [stream.curation for stream in self.streams.values() if stream.curation is not None]
        self.observes = bool(self._curations)  # whether tasks are chosen by rewards
        self.compositions = recipe.compositions()  # the policies of one task group, for each kind of group; () is all
        self.group_size = recipe.rollout.group_size
        self._sampling = sampling_of(recipe.sampling)
        self._timeout_s = recipe.rollout.timeout_s

    def next_group(self, policies: tuple[str, ...] = (), source: str = "") -> TaskGroup:
        """The next task group of a source for these policies; without a name, for all of the run.

        Its task and seed depend on the source and on how many groups of it came before, and not on the other sources.
        """
        stream = self.streams[source]
        position, row = stream.draw()
        order = TaskGroupOrder(
            task_group_id=self._names.draw(),
            task=stream.tasks[row],
            indices=tuple(range(self.group_size)),
            purpose=Purpose.TRAIN,
            sampling=self._sampling,
            seed=derived_seed(self._seed, "train", *([source] if source else []), position),
            timeout_s=self._timeout_s,
            policies=policies,
            source=source,
        )
        return TaskGroup(order=order, position=position)

    def resume_after(self, source: str, position: int) -> None:
        """Continue a source after a position that an earlier process drew."""
        stream = self.streams[source]
        stream.next_position = max(stream.next_position, position + 1)

    def row_of(self, group: TaskGroup) -> int:
        """The row of a training group's task in its source."""
        return self.streams[group.order.source].curriculum.row(group.position)

    # --- curation ----------------------------------------------------------------------------------------------------

    @property
    def nothing_to_play(self) -> bool:
        """Whether the curation of a source refuses all of its tasks, so that refused ones are played."""
        return any(stream.nothing_to_play for stream in self.streams.values())

    def observe(self, source: str, row: int, rewards: Sequence[float]) -> None:
        """Pass the rewards of a task to the curation of its source."""
        curation = self.streams[source].curation
        if curation is not None:
            curation.observe(row, rewards)

    def advanced(self) -> None:
        """Note a published version."""
        for curation in self._curations:
            curation.advanced()

    def gauges(self) -> dict[str, float]:
        """The gauges of all curations: counts are added up, others are means."""
        found = [curation.gauges() for curation in self._curations]
        names = dict.fromkeys(name for values in found for name in values)
        summed = {name: [values[name] for values in found if name in values] for name in names}
        counts = (StepKey.CURATION_SKIPPED, StepKey.CURATION_SOLVED, StepKey.CURATION_UNSOLVED)
        return {name: sum(of) if name in counts else sum(of) / len(of) for name, of in summed.items()}

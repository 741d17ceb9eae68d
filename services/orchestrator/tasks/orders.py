"""Creates task groups: their order, names, tasks, seeds and sampling. Independent of the time of issue and the replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.common.config.data import SamplingConfig, name_of
from services.common.config.recipe import Recipe
from services.common.records.types import Purpose, Sampling, TaskGroupOrder
from services.common.seeds import derived_seed
from services.common.telemetry.metrics import StepKey
from services.orchestrator.state.groups import TaskGroup
from services.orchestrator.tasks.curation import build_curation
from services.orchestrator.tasks.datasets import TaskSource


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
        self.position = 0

    def row(self, position: int) -> int:
        """The row at a position; the same for ever, given number of tasks and seed."""
        pass_number, offset = divmod(position, self.num_tasks)
        if not self._shuffle:
            return offset
        if pass_number != self._pass_number:
            self._order = np.random.default_rng([self._seed, pass_number]).permutation(self.num_tasks)
            self._pass_number = pass_number
        return int(self._order[offset])

    def draw(self) -> tuple[int, int]:
        """The next (position, row)."""
        position = self.position
        self.position += 1
        return position, self.row(position)

    def resume_after(self, position: int) -> None:
        """Continue after a position that was drawn earlier."""
        self.position = max(self.position, position + 1)


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


class Curation(Protocol):
    """Protocol of curations: one call of ``accepts`` per position of the curriculum, one of ``observe`` per group."""

    def accepts(self, row: int, position: int) -> bool: ...

    def observe(self, row: int, rewards: Sequence[float]) -> None: ...

    def advanced(self) -> None:
        """Note a published version."""
        ...

    def gauges(self) -> dict[str, float]: ...


class AcceptAll:
    """Accepts every prompt."""

    def accepts(self, row: int, position: int) -> bool:
        return True

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        pass

    def advanced(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}


@dataclass(slots=True)
class Stream:
    """The tasks of one source, in the order in which they are issued."""

    tasks: TaskSource
    curriculum: Curriculum
    curation: Curation = field(default_factory=AcceptAll)
    nothing_to_play: bool = False  # the curation refused a whole pass, so refused tasks are played

    def draw(self) -> tuple[int, int]:
        """The next accepted (position, row); after a whole refused pass, the last one."""
        position, row = self.curriculum.draw()
        for _ in range(self.curriculum.num_tasks - 1):
            if self.curation.accepts(row, position):
                break
            position, row = self.curriculum.draw()
        else:
            self.nothing_to_play = not self.curation.accepts(row, position)
            return position, row
        self.nothing_to_play = False
        return position, row


class TrainingOrders:
    """Creates training task groups, those of each source in its curriculum's order."""

    def __init__(
        self,
        streams: Mapping[str, Stream],
        names: GroupNames,
        *,
        group_size: int,
        sampling: Sampling,
        timeout_s: float,
        seed: int,
        compositions: Sequence[tuple[str, ...]] = ((),),
    ) -> None:
        """``streams``: by name of the source, the only one without a name. ``compositions``: the policies of one task group,
        for each kind of group; () is all of the run."""
        self.streams = dict(streams)
        self.compositions = tuple(compositions)
        self._names = names
        self.group_size = group_size
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._seed = seed

    @classmethod
    def of(cls, recipe: Recipe, tasks: Mapping[str, TaskSource], names: GroupNames) -> TrainingOrders:
        """The training orders of a recipe; ``tasks`` by source."""
        seed = recipe.run.seed

        def stream(section: str) -> Stream:
            source = name_of(section)
            curriculum = Curriculum(
                len(tasks[source]), recipe.data.seed_of(section, seed), recipe.data.training[section].shuffle
            )
            own_seed = derived_seed(seed, "curation", source) if source else seed
            return Stream(tasks[source], curriculum, build_curation(recipe.data, own_seed) or AcceptAll())

        return cls(
            {name_of(section): stream(section) for section in recipe.data.training},
            names,
            group_size=recipe.rollout.group_size,
            sampling=sampling_of(recipe.sampling),
            timeout_s=recipe.rollout.timeout_s,
            seed=seed,
            compositions=recipe.compositions(),
        )

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
        self.streams[source].curriculum.resume_after(position)

    def row_of(self, group: TaskGroup) -> int:
        """The row of a training group's task in its source."""
        return self.streams[group.order.source].curriculum.row(group.position)

    # --- curation ----------------------------------------------------------------------------------------------------

    @property
    def observes(self) -> bool:
        """Whether the curations choose tasks by rewards."""
        return not all(isinstance(stream.curation, AcceptAll) for stream in self.streams.values())

    @property
    def nothing_to_play(self) -> bool:
        """Whether the curation of a source refuses all of its tasks, so that refused ones are played."""
        return any(stream.nothing_to_play for stream in self.streams.values())

    def observe(self, source: str, row: int, rewards: Sequence[float]) -> None:
        """Pass the rewards of a task to the curation of its source."""
        self.streams[source].curation.observe(row, rewards)

    def advanced(self) -> None:
        """Note a published version."""
        for stream in self.streams.values():
            stream.curation.advanced()

    def gauges(self) -> dict[str, float]:
        """The gauges of all curations: counts are added up, others are means."""
        found = [stream.curation.gauges() for stream in self.streams.values()]
        names = dict.fromkeys(name for values in found for name in values)
        return {name: _together(name, [values[name] for values in found if name in values]) for name in names}


def _together(name: str, values: Sequence[float]) -> float:
    total = sum(values)
    return (
        total
        if name in (StepKey.CURATION_SKIPPED, StepKey.CURATION_SOLVED, StepKey.CURATION_UNSOLVED)
        else total / len(values)
    )

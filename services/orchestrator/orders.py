"""Task groups about to be issued: their names, tasks, seeds and sampling. Knows nothing about when or to whom."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.config.data import SamplingConfig
from services.common.seeds import derived_seed
from services.common.types import Purpose, Sampling, TaskGroupOrder
from services.orchestrator.curation import AcceptAll, Curation
from services.orchestrator.curriculum import Curriculum
from services.orchestrator.datasets import TaskSource
from services.orchestrator.groups import TaskGroup

MOST_DIGITS = 18


class GroupNames:
    """Names ``<mark of the run>-<number>``: counted up, so a name tells whether it was ever issued in this run."""

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
        """Leave out names that may have been drawn."""
        self._next += count

    def was_issued(self, name: str) -> bool:
        number = self._number(name)
        return number is not None and 0 < number < self._next

    def _number(self, name: str) -> int | None:
        mark, _, number = name.rpartition("-")
        is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
        return int(number) if mark == self._mark and is_number else None


def sampling_of(config: SamplingConfig) -> Sampling:
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
    )


class TrainingOrders:
    """Training task groups, in the curriculum's order."""

    def __init__(
        self,
        source: TaskSource,
        curriculum: Curriculum,
        names: GroupNames,
        *,
        group_size: int,
        sampling: Sampling,
        timeout_s: float,
        seed: int,
        curation: Curation | None = None,
        compositions: Sequence[tuple[str, ...]] = ((),),
    ) -> None:
        """``compositions``: the policies of one task group, for each kind of group there is; () is all of the run."""
        self.compositions = tuple(compositions)
        self._source = source
        self.curriculum = curriculum
        self.curation: Curation = curation if curation is not None else AcceptAll()
        self._names = names
        self.group_size = group_size
        self.nothing_to_play = False  # curation refused a whole pass, so what it refused is played
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._seed = seed

    def next_group(self, policies: tuple[str, ...] = ()) -> TaskGroup:
        """The next task, to be played by these policies; none named is all of the run."""
        position, row = self._draw()
        order = TaskGroupOrder(
            task_group_id=self._names.draw(),
            task=self._source[row],
            indices=tuple(range(self.group_size)),
            purpose=Purpose.TRAIN,
            sampling=self._sampling,
            seed=derived_seed(self._seed, "train", position),
            timeout_s=self._timeout_s,
            policies=policies,
        )
        return TaskGroup(order=order, position=position)

    def _draw(self) -> tuple[int, int]:
        """The next (position, row) that is worth playing; when a whole pass is not, the last one rather than nothing."""
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

    def row_of(self, group: TaskGroup) -> int:
        """The row of a training group's task."""
        return self.curriculum.row(group.position)

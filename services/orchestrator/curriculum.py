"""The order in which tasks are drawn: every task once per pass, each pass in its own seeded order.

The position is a plain count, so whoever remembers it can go on exactly there. Knows nothing about rows or rewards.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
        """Go on behind a position that was drawn earlier."""
        self.position = max(self.position, position + 1)

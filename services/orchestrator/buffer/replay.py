"""Groups that were trained and may be trained again: a bounded store per policy, first in, first out.

A batch draws whole groups at random until it has what it wants, none twice. What is older than the store's own bound on
staleness leaves when the version advances, so that nothing older can be drawn. What is drawn stays. The draw depends on
``run.seed``, policy, training step and contents alone. Knows nothing about quotas, journals or how a batch is recorded.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from services.common.config.policy import ReplayConfig
from services.common.seeds import derived_seed
from services.orchestrator.groups import AdvantageGroup


class ReplayStore:
    def __init__(self, policy: str, config: ReplayConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed  # of the run
        self._groups: deque[AdvantageGroup] = deque()
        self.version = 0
        self.num_sequences = 0

    @property
    def enabled(self) -> bool:
        return self._config.ratio > 0

    @property
    def groups(self) -> tuple[AdvantageGroup, ...]:
        """Oldest arrival first."""
        return tuple(self._groups)

    def trained(self, groups: Iterable[AdvantageGroup], version: int) -> None:
        """The training step that made ``version`` had these groups for the first time."""
        self.version = max(self.version, version)
        for group in groups:
            self._groups.append(group)
            self.num_sequences += group.size
        young = [group for group in self._groups if self._young(group)]
        self._groups = deque(young)
        self.num_sequences = sum(group.size for group in young)
        while self.num_sequences > self._config.capacity:
            self.num_sequences -= self._groups.popleft().size

    def draw(self, training_step: int, num_sequences: int) -> list[AdvantageGroup]:
        """Groups with at least so many sequences, or all there are."""
        candidates = list(self._groups)
        random.Random(derived_seed(self._seed, "replay", self._policy, training_step)).shuffle(candidates)
        drawn: list[AdvantageGroup] = []
        count = 0
        for group in candidates:
            if count >= num_sequences:
                break
            drawn.append(group)
            count += group.size
        return drawn

    def _young(self, group: AdvantageGroup) -> bool:
        """A group without trained tokens teaches nothing a second time either."""
        oldest = group.min_version
        return oldest is not None and self.version - oldest <= self._config.max_staleness

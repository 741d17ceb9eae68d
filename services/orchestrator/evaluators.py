"""Where an evaluation is played, so that it stops nobody.

    nobody trains               -> on every replica, pinned to the newest versions
    replicas to spare           -> on ``evaluation.engines`` whole replicas, pinned to what they hold; training on the others
    none to spare               -> on a share of the slots, following training: ``pinned: false``, with the range of versions

A pinned replica takes no newer version and no new training group until the last task of its evaluation is issued; what
it was playing is never cancelled. Knows nothing about the journal or grpc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from services.common.config.data import EvaluationConfig
from services.orchestrator.evaluation import EvaluationPass, Evaluations
from services.orchestrator.groups import TaskGroup
from services.orchestrator.pool import Replica, ReplicaPool


class Evaluators:
    def __init__(
        self,
        config: EvaluationConfig,
        evaluations: Evaluations,
        pool: ReplicaPool,
        groups: Mapping[str, TaskGroup],
        may_play: Callable[[Replica, Mapping[str, int], tuple[str, ...]], bool],
        newest: Callable[[str], int],
    ) -> None:
        """``may_play``: whether a replica holds known versions of these policies, and exactly the required ones.
        ``newest``: the number of a policy's newest version."""
        self._config = config
        self._evaluations = evaluations
        self._pool = pool
        self._groups = groups
        self._may_play = may_play
        self._newest = newest

    def place(self, current: EvaluationPass, training: bool) -> str:
        """Decide where a pass is played, if that is open; returns what it waits for, empty when it is decided."""
        if current.pinned is None and training and not self._adopt_sibling(current):
            return self._choose(current)
        if current.pinned is None:  # training is over: what was asked for may be held by nobody any more
            newest = {policy: max(number, self._newest(policy)) for policy, number in current.wanted.items()}
            current.versions, current.pinned, current.awaited = newest, True, frozenset()
        if not current.pinned:
            return ""
        comes_to_all = all(number >= self._newest(policy) for policy, number in current.versions.items())
        if comes_to_all and not training:
            current.evaluators = frozenset()
        elif not any(r.replica_id in current.evaluators for r in self._pool):
            holders = [r for r in self._workers(current) if self._may_play(r, current.versions, current.policies)]
            current.evaluators = _ids(_freest_first(holders)[: self._config.engines])
        return ""

    def usable(self, current: EvaluationPass, num_slots: int) -> list[Replica]:
        """Replicas that can take a task group of this pass now."""
        found = [
            r
            for r in self._workers(current)
            if r.fits(num_slots) and self._may_play(r, current.required(), current.policies)
        ]
        if current.evaluators:
            return [r for r in found if r.replica_id in current.evaluators]
        return found if current.pinned else [r for r in found if self._within_share(r, num_slots)]

    def reserved(self) -> frozenset[str]:
        """Replicas that get no training groups: an evaluation still has tasks for them."""
        return frozenset().union(*(current.evaluators for current in self._evaluations if current.has_left))

    def pinned_version(self, replica: Replica, policy: str) -> int | None:
        """The version that the replica keeps for an evaluation, also between two of its tasks."""
        for current in self._evaluations:
            if current.pinned and replica.replica_id in current.evaluators and current.has_left:
                return current.versions.get(policy)
        return replica.pinned_version(policy)

    def awaited_version(self, replica: Replica, policy: str) -> int | None:
        """The least version that an evaluation waits for the replica to hold, if one does."""
        for current in self._evaluations:
            if replica.replica_id in current.awaited and current.has_left:
                return current.wanted.get(policy)
        return None

    def _choose(self, current: EvaluationPass) -> str:
        workers = self._workers(current)
        if len(workers) <= self._config.engines:
            current.pinned, current.versions, current.awaited = False, current.wanted, frozenset()
            return ""
        policies = tuple(current.wanted)
        ready = [
            r
            for r in _freest_first(workers)
            if self._may_play(r, {}, policies)
            and all(r.held[p].number >= n for p, n in current.wanted.items())
            and not any(r.is_moving(policy) for policy in policies)  # it would leave the version that it holds
        ]
        if not ready:
            # With versions that follow each other faster than they are fetched, no replica would ever stand still.
            if not current.awaited & _ids(workers):
                current.awaited = _ids(_freest_first(workers)[: self._config.engines])
            return "no replica holds the version to evaluate yet"
        current.awaited = frozenset()
        current.versions = {policy: ready[0].held[policy].number for policy in policies}
        alike = [r for r in ready if self._may_play(r, current.versions, policies)]
        current.pinned, current.evaluators = True, _ids(alike[: self._config.engines])
        return ""

    def _adopt_sibling(self, current: EvaluationPass) -> bool:
        """The other passes of the same evaluation are played on the same versions."""
        for other in self._evaluations:
            same = other.evaluation_id == current.evaluation_id and other.policies == current.policies
            if other is not current and same and other.pinned is not None:
                current.pinned, current.versions, current.evaluators = other.pinned, other.versions, other.evaluators
                return True
        return False

    def _workers(self, current: EvaluationPass) -> list[Replica]:
        return [r for r in self._pool if r.takes_work and all(policy in r.held for policy in current.wanted)]

    def _within_share(self, replica: Replica, num_slots: int) -> bool:
        used = sum(
            len(assignment.open_slots)
            for name, assignment in replica.assignments.items()
            if (group := self._groups.get(name)) is not None and not group.is_training
        )
        return used + num_slots <= max(num_slots, self._config.share * replica.num_slots)


def _freest_first(replicas: Iterable[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda r: (-r.num_free, r.replica_id))


def _ids(replicas: Iterable[Replica]) -> frozenset[str]:
    return frozenset(r.replica_id for r in replicas)

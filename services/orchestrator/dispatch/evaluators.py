"""Chooses the replicas of an evaluation so that training continues.

    no training                  -> every replica, pinned to the newest versions
    spare replicas               -> ``evaluation.engines`` whole replicas, pinned to their held versions; training elsewhere
    none spare, the pass fits    -> a share of one replica's slots, pinned: the whole pass at once, beside training
    none spare, too large        -> a share of the slots, following training: ``pinned: false``, with the range of versions

A pinned replica takes no newer version and no new training group until the evaluation has issued its last task; the
replica finishes its running work. So one replica is held for the duration of its longest rollouts, not for a queue of
them. Independent of the journal and grpc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.config.data import EvaluationConfig
from services.orchestrator.dispatch.evaluation import EvaluationPass, Evaluations
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.replica import Held, Replica, Shelf, ShelfKey


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
        if current.pinned is None and training and not self._adopt_sibling(current):
            return self._choose(current)
        if current.pinned is None:  # training is over: possibly no replica holds the requested versions
            newest = {policy: max(number, self._newest(policy)) for policy, number in current.wanted.items()}
            current.versions, current.pinned, current.awaited = newest, True, frozenset()
        if not current.pinned:
            return ""
        comes_to_all = all(number >= self._newest(policy) for policy, number in current.versions.items())
        if comes_to_all and not training:
            current.evaluators = frozenset()
        elif not any(self._pool.get(name) is not None for name in current.evaluators):
            holders = self._workers(current, lambda shelf: self._holds(shelf.held, current, current.versions))
            current.evaluators = frozenset(holders[: self._config.engines])
        return ""

    def freest(self, current: EvaluationPass, num_slots: int) -> Replica | None:
        """The replica for the next task group of this pass, with the most free slots of those that can."""
        required = current.required()
        if current.evaluators:
            chosen = (self._pool.get(name) for name in current.evaluators if name in self._pool.free)
            usable = [
                r for r in chosen if r is not None and r.fits(num_slots) and self._holds(r.held, current, required)
            ]
            return max(usable, key=lambda r: (r.num_free, r.replica_id), default=None)
        if current.pinned:
            return self._pool.freest(num_slots, lambda shelf: self._holds(shelf.held, current, required))
        name = self._pool.free_of_evaluations.freest(
            num_slots,
            lambda shelf: self._within_share(shelf.alike, num_slots) and self._holds(shelf.held, current, required),
        )
        return None if name is None else self._pool.get(name)

    def reserved(self) -> frozenset[str]:
        """Replicas without training groups, because an evaluation still has tasks for them."""
        return frozenset().union(*(current.evaluators for current in self._evaluations if current.has_left))

    def pinned_version(self, replica: Replica, policy: str) -> int | None:
        """The version that the replica keeps for an evaluation, also between two of its tasks."""
        for current in self._evaluations:
            if current.pinned and replica.replica_id in current.evaluators and current.has_left:
                return current.versions.get(policy)
        return replica.pinned_version(policy)

    def awaited_version(self, replica: Replica, policy: str) -> int | None:
        """The least version that an evaluation awaits on the replica, if any."""
        for current in self._evaluations:
            if replica.replica_id in current.awaited and current.has_left:
                return current.wanted.get(policy)
        return None

    def _choose(self, current: EvaluationPass) -> str:
        able = [shelf for shelf in self._pool.free.shelves() if _serves(shelf.held, current)]
        is_few = sum(len(shelf.places) for shelf in able) <= self._config.engines
        if is_few and not any(self._fits_at_once(name, current) for shelf in able for _, name in shelf.places):
            current.pinned, current.versions, current.awaited = False, current.wanted, frozenset()
            return ""
        policies = tuple(current.wanted)
        ready = self._workers(
            current,
            lambda shelf: (
                self._may_play(shelf.held, {}, policies)
                and all(shelf.held[p].number >= n for p, n in current.wanted.items())
                and not any(policy in shelf.alike.moving for policy in policies)
            ),  # the replica would leave its held version
        )
        if not ready:
            # With versions that follow each other faster than they are fetched, no replica would ever stand still.
            if not any(self._is_worker(name, current) for name in current.awaited):
                current.awaited = frozenset(self._workers(current)[: self._config.engines])
            return "no replica holds the version to evaluate yet"
        current.awaited = frozenset()
        freest = self._pool.get(ready[0])
        assert freest is not None
        current.versions = {policy: freest.held[policy].number for policy in policies}
        alike = [name for name in ready if self._holds_now(name, current.versions, policies)]
        current.pinned, current.evaluators = True, frozenset(alike[: self._config.engines])
        return ""

    def _holds_now(self, name: str, versions: Mapping[str, int], policies: tuple[str, ...]) -> bool:
        replica = self._pool.get(name)
        return replica is not None and self._may_play(replica.held, versions, policies)

    def _adopt_sibling(self, current: EvaluationPass) -> bool:
        """Adopt versions and replicas of another pass of the same evaluation and policies; False without a decided one."""
        for other in self._evaluations:
            same = other.evaluation_id == current.evaluation_id and other.policies == current.policies
            if other is not current and same and other.pinned is not None:
                current.pinned, current.versions, current.evaluators = other.pinned, other.versions, other.evaluators
                return True
        return False

    def _workers(self, current: EvaluationPass, serves: Callable[[Shelf], bool] = lambda shelf: True) -> list[str]:
        """Replicas that take work, hold all policies of the pass and belong to shelves that ``serves``: freest first,
        then by id. Scans every replica, so the caller asks once per decision, not per task group."""
        able = [shelf for shelf in self._pool.free.shelves() if _serves(shelf.held, current) and serves(shelf)]
        places = sorted((-free, name) for shelf in able for free, name in shelf.places)
        return [name for _, name in places]

    def _is_worker(self, name: str, current: EvaluationPass) -> bool:
        replica = self._pool.get(name)
        return replica is not None and replica.takes_work and _serves(replica.held, current)

    def _holds(self, held: Mapping[str, Held], current: EvaluationPass, versions: Mapping[str, int]) -> bool:
        return _serves(held, current) and self._may_play(held, versions, current.policies)

    def _within_share(self, alike: ShelfKey, num_slots: int) -> bool:
        return alike.num_evaluating + num_slots <= max(num_slots, self._config.share * alike.num_slots)

    def _fits_at_once(self, name: str, current: EvaluationPass) -> bool:
        replica = self._pool.get(name)
        return replica is not None and current.num_trajectories <= self._config.share * replica.num_slots


def _serves(held: Mapping[str, Held], current: EvaluationPass) -> bool:
    return all(policy in held for policy in current.wanted)

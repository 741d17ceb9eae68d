"""Gives the memory of a device that rollouts and training share to one holder at a time: the replicas, or one trainer.

    replicas ----a batch is ready---------> no holder ----all members have freed the device----> trainer
    trainer -----no next batch is ready---> no holder ----all members have freed the device----> replicas

A trainer computes as many steps as there are batches. Between two holders every member with a lease confirms that it has
freed the device; a lost lease counts as a confirmation, because the process has ended or starts again without the device.
The first turn, also after a restart of this process, begins when all members of the recipe have joined, or a lease later:
until then a member of an earlier run of this process may hold the device. Independent of grpc and of batches' contents.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import structlog

from services.common.records.device_turn import DeviceTurn
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.replica import Replica
from services.orchestrator.members.trainers import Trainer, TrainerLeases

log = structlog.get_logger()

REPLICAS = ""  # the holder that is no policy
SLOW_FREE_S = 60.0  # after which members that have not freed the device are named in the log


class Need(enum.Enum):
    """Of a trainer for the device."""

    NONE = enum.auto()  # the trainer waits for a batch that is not ready, has finished, or is absent
    WAITS = enum.auto()  # the trainer has a batch, or must load its model or write a checkpoint
    COMPUTES = enum.auto()  # the trainer has received a batch and has not asked for the next one


class DeviceTurns:
    def __init__(
        self,
        *,
        shared: bool,
        policies: Mapping[str, object],
        num_services: int,
        pool: ReplicaPool,
        trainers: TrainerLeases,
        on_granted: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """``policies`` have trainers in this run; ``num_services`` inference services belong to the recipe. ``on_granted``
        is called when a holder begins. Without ``shared`` there are no turns, and ``may_compute`` is not asked."""
        self._shared = shared
        self._need = dict.fromkeys(policies, Need.NONE)
        self._num_services = num_services
        self._pool = pool
        self._trainers = trainers
        self._on_granted = on_granted
        self._clock = clock
        self._opens_at = clock() + trainers.lease_s
        self._open = False
        # Members keep the number of an earlier process of the orchestrator: a new one must differ.
        self._number = time.time_ns()
        self.holder: str | None = None  # None between two holders, until all members have freed the device
        self._taken_at = self._freed_at = clock()  # when its holder, and when the replicas were last told to free it
        self._told_slow = False
        self.num_handed_over = 0

    # --- members -----------------------------------------------------------------------------------------------------

    def replica_joined(self, replica: Replica) -> None:
        """Tell a replica with a new stream whose turn it is."""
        if self._shared:
            self._tell_replica(replica)
            self.settle()

    def trainer_joined(self, trainer: Trainer, *, again: bool) -> None:
        """Tell a trainer with a new stream whose turn it is. A new process needs the device to load its model."""
        if not self._shared:
            return
        if not again:
            self._need[trainer.policy] = Need.WAITS
        self._tell_trainer(trainer)
        self.settle()

    def trainer_finished(self, policy: str) -> None:
        """Note that a trainer no longer needs the device."""
        if policy in self._need:
            self._need[policy] = Need.NONE

    def trainers_need_it(self) -> None:
        """Give every trainer a turn, for a checkpoint, before it asks for its next batch."""
        for trainer in self._trainers:
            if self._need[trainer.policy] is Need.NONE:
                self._need[trainer.policy] = Need.WAITS
        self.settle()

    def may_compute(self, policy: str, ready: bool) -> bool:
        """Whether a trainer that asks for a batch gets one: the batch is ``ready``, and the policy has the turn. For
        a shared device only."""
        has_turn = self.holder == policy
        self._need[policy] = Need.NONE if not ready else Need.COMPUTES if has_turn else Need.WAITS
        self.settle()
        return ready and has_turn

    # --- turns -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take the device from a holder without need, and give the device to the next holder when all members have freed it."""
        if not self._shared:
            return
        for policy in self._need:
            if self._trainers.get(policy) is None:
                self._need[policy] = Need.NONE
        if self.holder is not None and self._next() != self.holder:
            self._take()
        if self.holder is None and self._may_open():
            if waits_for := self.waits_for():
                self._tell_slow(waits_for)
            else:
                self._give(self._next())

    def waits_for(self) -> list[str]:
        """The members that have not freed the device yet; empty while a member holds it."""
        if self.holder is not None:
            return []
        return [name for name, turn, _ in self._members() if turn != self._number]

    def _next(self) -> str:
        """The next holder by need: a trainer keeps the device while its batches are ready; the policies take turns."""
        policies = list(self._need)
        if self.holder in self._need:
            if self._need[self.holder] is not Need.NONE:
                return self.holder
            begin = policies.index(self.holder) + 1
            policies = policies[begin:] + policies[:begin]
        return next((policy for policy in policies if self._need[policy] is not Need.NONE), REPLICAS)

    def _may_open(self) -> bool:
        if not self._open:
            joined = all(self._trainers.get(policy) is not None for policy in self._need)
            all_here = joined and len(self._pool) >= self._num_services
            self._open = all_here or self._clock() >= self._opens_at
        return self._open

    def _take(self) -> None:
        log.info("device.taken", holder=self.holder or "replicas")
        self._taken_at = self._clock()
        if self.holder == REPLICAS:
            self._freed_at = self._taken_at
        self.holder = None
        self._tell_all()

    def _give(self, holder: str) -> None:
        self.holder = holder
        self.num_handed_over += 1
        log.info("device.given", holder=holder or "replicas")
        if holder == REPLICAS:
            self._pool.prolong_work(self._clock() - self._freed_at)
        self._tell_all()
        self._on_granted()

    def _tell_slow(self, waits_for: list[str]) -> None:
        """Log the members that live and keep the device. A member that cannot free the device ends by itself."""
        slow = self._clock() - self._taken_at > SLOW_FREE_S
        if slow and not self._told_slow:
            log.error("device.not_freed", after_s=SLOW_FREE_S, waits_for=waits_for)
        self._told_slow = slow

    def _tell_all(self) -> None:
        self._number += 1
        for _, _, tell in self._members():
            tell()

    def _members(self) -> Iterator[tuple[str, int, Callable[[], None]]]:
        """Each member with a lease: its name, the newest turn that the member carried out, and a call that sends the turn."""
        for replica in self._pool:
            yield f"replica {replica.replica_id}", replica.device_turn, partial(self._tell_replica, replica)
        for trainer in self._trainers:
            yield f"trainer of {trainer.policy}", trainer.device_turn, partial(self._tell_trainer, trainer)

    def _tell_replica(self, replica: Replica) -> None:
        self._pool.send(replica, DeviceTurn(self._number, self.holder == REPLICAS))

    def _tell_trainer(self, trainer: Trainer) -> None:
        if trainer.mailbox is not None:
            trainer.mailbox.put(DeviceTurn(self._number, self.holder == trainer.policy))

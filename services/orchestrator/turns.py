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
from collections.abc import Callable

import structlog

from services.common.config.processes import Placement
from services.common.config.recipe import Recipe
from services.common.records import DeviceTurn
from services.orchestrator.members import Replica, ReplicaPool, Trainer, TrainerLeases

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
        recipe: Recipe,
        pool: ReplicaPool,
        trainers: TrainerLeases,
        on_granted: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """``on_granted`` is called when a holder begins. Without a shared placement there are no turns, and ``may_compute`` is
        not asked."""
        self._shared = recipe.placement is Placement.SHARED
        self._need = dict.fromkeys(recipe.trained_policies if recipe.run.steps else (), Need.NONE)
        self._num_services = len(recipe.inference)
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

    # --- members -----------------------------------------------------------------------------------------------------

    def replica_joined(self, replica: Replica) -> None:
        """Tell a replica with a new stream whose turn it is."""
        if self._shared:
            self._pool.send(replica, DeviceTurn(self._number, self.holder == REPLICAS))
            self.settle()

    def trainer_joined(self, trainer: Trainer, *, again: bool) -> None:
        """Tell a trainer with a new stream whose turn it is. A new process needs the device to load its model."""
        if not self._shared:
            return
        if not again:
            self._need[trainer.policy] = Need.WAITS
        if trainer.mailbox is not None:
            trainer.mailbox.put(DeviceTurn(self._number, self.holder == trainer.policy))
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
            log.info("device.taken", holder=self.holder or "replicas")
            self._taken_at = self._clock()
            if self.holder == REPLICAS:
                self._freed_at = self._taken_at
            self._tell_all(None)
        if self.holder is not None or not self._may_open():
            return
        if (
            waits_for := self.waits_for()
        ):  # members that live and keep the device; one that cannot free it ends by itself
            slow = self._clock() - self._taken_at > SLOW_FREE_S
            if slow and not self._told_slow:
                log.error("device.not_freed", after_s=SLOW_FREE_S, waits_for=waits_for)
            self._told_slow = slow
            return
        holder = self._next()
        log.info("device.given", holder=holder or "replicas")
        if holder == REPLICAS:
            self._pool.prolong_work(self._clock() - self._freed_at)
        self._tell_all(holder)
        self._on_granted()

    def waits_for(self) -> list[str]:
        """The members that have not freed the device yet; empty while a member holds it."""
        if self.holder is not None:
            return []
        turns = {f"replica {replica.replica_id}": replica.device_turn for replica in self._pool}
        turns |= {f"trainer of {trainer.policy}": trainer.device_turn for trainer in self._trainers}
        return [name for name, turn in turns.items() if turn != self._number]

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

    def _tell_all(self, holder: str | None) -> None:
        """Begin another turn, and send it to each member with a lease."""
        self.holder = holder
        self._number += 1
        for replica in self._pool:
            self._pool.send(replica, DeviceTurn(self._number, holder == REPLICAS))
        for trainer in self._trainers:
            if trainer.mailbox is not None:
                trainer.mailbox.put(DeviceTurn(self._number, holder == trainer.policy))

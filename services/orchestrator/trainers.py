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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from services.common.errors import LeaseLostError, SupersededError, UnknownPolicyError
from services.common.records import DeviceTurn
from services.common.telemetry.accounts import AccountState, PeerState
from services.orchestrator.members import Mailbox, Replica, ReplicaPool, TrainerCommand

# --- The trainers: one lease per policy, and commands to the holder of each lease.


@dataclass(slots=True, kw_only=True)
class Trainer:
    policy: str
    incarnation: str
    num_ranks: int
    recovered_version: int
    lease_until: float
    mailbox: Mailbox[TrainerCommand] | None = None
    state: str = "joined"
    training_step: int = 0
    checkpoint_step: int = 0
    kept_checkpoint_steps: tuple[int, ...] = ()  # durable checkpoints that the trainer can start from, ascending
    gauges: Mapping[str, float] = field(default_factory=dict)
    num_reports: int = 0
    device_turn: int = 0  # the newest that the trainer has carried out
    refusal: str = ""  # why the trainer does not train the batch of its step
    rank_reports: dict[int, int] = field(default_factory=dict)  # of ranks other than the first: reports by rank
    accounts: dict[int, tuple[AccountState, ...]] = field(default_factory=dict)  # by rank
    peers: tuple[PeerState, ...] = ()  # state of its dependencies, as the trainer reports them

    @property
    def oldest_checkpoint_step(self) -> int:
        """Batches after this step may be trained again; 0 while there is no checkpoint, so all of them."""
        return min(self.kept_checkpoint_steps, default=0)


class TrainerLeases:
    def __init__(self, policies: Mapping[str, object], lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._trainers: dict[str, Trainer | None] = dict.fromkeys(policies)

    def __iter__(self) -> Iterator[Trainer]:
        return iter([trainer for trainer in self._trainers.values() if trainer is not None])

    def known(self, policy: str) -> str:
        """The policy's name, if the run has such a policy; else raises UnknownPolicyError."""
        if policy not in self._trainers:
            raise UnknownPolicyError(f"no policy {policy!r} in this run; it has {', '.join(self._trainers)}")
        return policy

    def get(self, policy: str) -> Trainer | None:
        """The policy's trainer; None without one."""
        return self._trainers[self.known(policy)]

    def join(
        self,
        policy: str,
        incarnation: str,
        num_ranks: int,
        recovered_version: int,
        kept_checkpoint_steps: Iterable[int] = (),
    ) -> Trainer:
        """A stream of a trainer begins; a new incarnation ends the lease of the older one."""
        trainer = self.get(policy)
        if trainer is not None and trainer.mailbox is not None:
            if trainer.incarnation == incarnation:
                trainer.mailbox.close(SupersededError("the same trainer opened a newer stream"))
            else:
                trainer.mailbox.close(LeaseLostError(f"another trainer of {policy} has joined", holder=incarnation))
        if trainer is None or trainer.incarnation != incarnation:
            trainer = Trainer(
                policy=policy,
                incarnation=incarnation,
                num_ranks=num_ranks,
                recovered_version=recovered_version,
                lease_until=0.0,
                checkpoint_step=max(recovered_version, 0),
            )
            self._trainers[policy] = trainer
        trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
        trainer.mailbox = Mailbox()
        trainer.lease_until = self._clock() + self.lease_s
        return trainer

    def check(self, policy: str, incarnation: str) -> Trainer | None:
        """The lease holder, None without one (after a restart of the orchestrator).

        Raises:
            LeaseLostError: another incarnation holds the lease.
        """
        trainer = self.get(policy)
        if trainer is not None and trainer.incarnation != incarnation:
            raise LeaseLostError(f"another trainer of {policy} has joined", policy=policy, holder=trainer.incarnation)
        return trainer

    def report(
        self,
        policy: str,
        incarnation: str,
        *,
        training_step: int,
        state: str,
        checkpoint_step: int,
        gauges: Mapping[str, float],
        kept_checkpoint_steps: Iterable[int] = (),
        device_turn: int = 0,
        refusal: str = "",
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
    ) -> Trainer:
        """Renew the lease; raises LeaseLostError for an ended lease or the lease of another incarnation."""
        trainer = self.check(policy, incarnation)
        if trainer is None:
            raise LeaseLostError(f"the trainer of {policy} holds no lease: join again", policy=policy)
        trainer.training_step, trainer.state, trainer.gauges = training_step, state, gauges
        trainer.checkpoint_step = max(trainer.checkpoint_step, checkpoint_step)
        trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
        trainer.num_reports += 1
        trainer.device_turn = device_turn
        trainer.refusal = refusal
        trainer.accounts[0], trainer.peers = accounts, peers
        trainer.lease_until = self._clock() + self.lease_s
        return trainer

    def report_rank(self, policy: str, rank: int, accounts: tuple[AccountState, ...]) -> None:
        """A rank other than the first says where its time goes. The lease is the first one's business."""
        trainer = self.get(policy)
        if trainer is not None and rank < trainer.num_ranks:
            trainer.rank_reports[rank] = trainer.rank_reports.get(rank, 0) + 1
            trainer.accounts[rank] = accounts

    def prolong(self, seconds: float) -> None:
        """Extend all leases by the seconds during which this process did not run and received no reports."""
        for trainer in self:
            trainer.lease_until += seconds

    def stream_ended(self, trainer: Trainer, mailbox: Mailbox[TrainerCommand]) -> None:
        if trainer.mailbox is mailbox:
            trainer.mailbox = None

    def expire(self) -> list[Trainer]:
        now = self._clock()
        lost = [trainer for trainer in self if trainer.lease_until <= now]
        for trainer in lost:
            if trainer.mailbox is not None:
                trainer.mailbox.close(
                    LeaseLostError(f"the trainer of {trainer.policy} did not report for {self.lease_s} s")
                )
                trainer.mailbox = None
            self._trainers[trainer.policy] = None
        return lost

    def send_all(self, command: TrainerCommand) -> None:
        for trainer in self:
            if trainer.mailbox is not None:
                trainer.mailbox.put(command)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for trainer in self:
            if trainer.mailbox is not None:
                trainer.mailbox.close()


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

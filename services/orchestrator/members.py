"""The members of a run: replicas, in a pool with the slots that each of them runs, and trainers, with their leases; the
commands to them, and the checks of what they report.

A replica is its own report and the ledger of the slots that the orchestrator gave to the replica. The ledger keeps
counters, so a choice among replicas does not sum over task groups.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.errors import (
    CapacityError,
    InvalidRequestError,
    LeaseLostError,
    RollmillError,
    SupersededError,
    UnknownPolicyError,
)
from services.common.records import DeviceTurn, FetchPlan, Interval, TaskGroupOrder, WeightVersion
from services.common.telemetry.accounts import AccountState, Component, PeerState
from services.common.telemetry.accounts import replica as replica_component
from services.orchestrator.groups import Incarnation, TaskGroup

# --- Commands of the orchestrator to replicas and trainers, as plain records, and the queue in which they wait for one
# peer.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlayGroup:
    order: TaskGroupOrder


@dataclass(frozen=True, slots=True)
class CancelGroup:
    task_group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceVersion:
    version: WeightVersion
    plan: FetchPlan | None = None


@dataclass(frozen=True, slots=True)
class LeavePool:
    reason: str


@dataclass(frozen=True, slots=True)
class UseGateway:
    address: str


ReplicaCommand = PlayGroup | CancelGroup | AnnounceVersion | LeavePool | UseGateway | DeviceTurn


class TrainerRequest(enum.StrEnum):
    """Requests without a value; each is the name of its field in the stream."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE_CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class StopTraining:
    reason: str


TrainerCommand = TrainerRequest | StopTraining | DeviceTurn


class Mailbox(Generic[T]):
    """A bounded queue with one reader: commands on their way to one peer.

    The sender never waits: a peer that does not read loses its stream (``overflow``) and must join again; after that the
    sender repeats all wanted commands. Independent of the kind of the items.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._error: RollmillError | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """False when the mailbox is closed or full."""
        if self.closed or len(self._items) >= self._capacity:
            return False
        self._items.append(item)
        self._changed.set()
        return True

    def close(self, error: RollmillError | None = None) -> None:
        """Close the mailbox. Without an error the reader still gets the queued items; with one the reader gets the
        error at once."""
        if self.closed:
            return
        self.closed = True
        self._error = error
        self._changed.set()

    async def get(self) -> T | None:
        """The next item, or None after the end of the mailbox.

        Has no deadline: the wait lasts as long as the peer's stream, and the owner ends the wait with ``close``.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._items:
                return self._items.popleft()
            if self.closed:
                return None
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class Held:
    """A policy's weights in a replica; -1 before the first load."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Facts of a replica at its join."""

    replica_id: str
    incarnation: str
    num_slots: int
    held: Mapping[str, Held]
    running: tuple[str, ...] = ()  # task groups that the replica runs
    weights_address: str = ""


@dataclass(slots=True, kw_only=True)
class Assignment:
    """Slots of one task group at one replica."""

    open_slots: set[int]
    since: float
    pinned: Mapping[str, int]  # versions that must not change meanwhile (evaluation)
    evaluates: bool = False
    issued: bool = False  # durable: the order may be sent
    seen: bool = False  # the replica has confirmed it
    num_unseen: int = 0  # reports since the issue without this task group


@dataclass(slots=True, kw_only=True)
class Replica:
    """``assignments`` change only through methods, which also count their slots."""

    replica_id: str
    incarnation: str
    lease_until: float
    num_slots: int = 0
    held: Mapping[str, Held] = field(default_factory=dict)
    weights_address: str = ""
    mailbox: Mailbox[ReplicaCommand] | None = None  # None while its stream is broken
    silent_since: float | None = None  # time at which the stream broke, without a report since
    draining: bool = False
    assignments: dict[str, Assignment] = field(default_factory=dict)
    num_running: int = 0  # open slots of all assignments
    num_evaluating: int = 0  # of these, of evaluations
    announced: dict[str, tuple[int, float]] = field(default_factory=dict)  # policy -> (version, when)
    num_tokens: int = 0
    new_tokens: int = 0  # between the newest report and the one before
    tokens_per_s: float = 0.0
    reported_at: float | None = None
    num_reports: int = 0
    device_turn: int = 0  # the newest that the replica has carried out
    accounts: tuple[AccountState, ...] = ()
    peers: tuple[PeerState, ...] = ()  # state of its dependencies, as the replica reports them
    component: Component = field(init=False)  # its name in accounts and stalls
    key: Incarnation = field(init=False)

    def __post_init__(self) -> None:
        self.component = replica_component(self.replica_id)
        self.key = self.replica_id, self.incarnation

    @property
    def num_free(self) -> int:
        """Free slots by the ledger; negative for a replica that came back with fewer slots than its running task groups
        need."""
        return self.num_slots - self.num_running

    # --- versions ----------------------------------------------------------------------------------------------------

    @property
    def moving(self) -> list[str]:
        """Policies with an announced version newer than the held one."""
        told = self.announced.items()
        return [p for p, (number, _) in told if (held := self.held.get(p)) is not None and number > held.number]

    def pinned_version(self, policy: str) -> int | None:
        """The version that an evaluation pins."""
        return next((a.pinned[policy] for a in self.assignments.values() if policy in a.pinned), None)

    # --- the ledger --------------------------------------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """Remove a task group from this replica."""
        assignment = self.assignments.pop(name)
        self.num_running -= len(assignment.open_slots)
        self.num_evaluating -= assignment.evaluates * len(assignment.open_slots)

    # --- reported task groups ----------------------------------------------------------------------------------------

    def note_running(self, task_group_ids: Iterable[str] | None) -> None:
        """Compare the reported task groups with the assigned ones; None for a replica that does not report them."""
        if task_group_ids is None:
            return
        said = frozenset(task_group_ids)
        for name, assignment in self.assignments.items():
            if assignment.issued and not assignment.seen:
                assignment.seen = name in said
                assignment.num_unseen += not assignment.seen

    def unseen(self, num_reports: int) -> list[Assignment]:
        """Task groups that this many reports or more did not contain."""
        return [found for found in self.assignments.values() if not found.seen and found.num_unseen >= num_reports]


# --- The replica pool: leases, held versions, and the slots of task groups that each replica runs.


REPORT_S = 2.0  # between two reports of a replica
MOST_REPORTS_PER_S = 200.0  # of all replicas: a larger pool reports less often
MOST_REPORT_S = 5.0  # and never less often than this
# At least: a live replica tries to rejoin within a fraction of a second, and has reported twice by then.
REJOIN_S = 4.0
MOST_MET = 65_536  # incarnations that are remembered
SPARE_COMMANDS = 1024  # on their way to a replica, beside the orders for its slots


class ReplicaPool:
    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self.on_orphaned: Callable[[list[str]], None] = lambda groups: None
        """Receives task groups with open slots that no replica runs."""
        self.resumed = False  # an earlier process may have counted the samples before the first report here
        self._sampled: dict[tuple[str, str], int] = {}  # tokens, by replica and incarnation; outlives leases
        self.replicas: dict[str, Replica] = {}
        self._owners: dict[str, str] = {}  # task group -> replica id
        self._met: dict[Incarnation, None] = {}  # incarnations that ever joined, newest last; outlives leases
        self.takers = 0  # changes when other replicas take work, or they hold other versions or serve elsewhere

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self.replicas.values()))

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def report_every_s(self) -> float:
        """Interval of a replica's reports: as short as the total rate allows, and several times in a lease."""
        seldom = min(len(self.replicas) / MOST_REPORTS_PER_S, MOST_REPORT_S, self.lease_s / 6)
        return max(REPORT_S, seldom)

    def get(self, replica_id: str) -> Replica | None:
        return self.replicas.get(replica_id)

    def workers(self) -> Iterator[Replica]:
        """The replicas that take work."""
        return (r for r in self.replicas.values() if r.mailbox is not None and not r.draining)

    def freest(self, num_slots: int, serves: Callable[[Replica], bool]) -> Replica | None:
        """The replica that ``serves`` with the most free slots, of several the one with the greatest id, of those that take
        work and have room for a task group of this many slots, or are idle and smaller than the group."""
        best: tuple[int, str] | None = None
        for replica in self.workers():
            found = replica.num_slots - replica.num_running, replica.replica_id
            if best is not None and found <= best:
                continue
            if (found[0] >= num_slots or not replica.assignments) and serves(replica):
                best = found
        return None if best is None else self.replicas[best[1]]

    def owner(self, task_group_id: str) -> Replica | None:
        name = self._owners.get(task_group_id)
        return None if name is None else self.replicas.get(name)

    def has_met(self, member: Incarnation) -> bool:
        """Whether this incarnation of a replica has ever joined, as far as this process knows."""
        return member in self._met

    # --- leases ------------------------------------------------------------------------------------------------------

    def join(self, hello: Hello) -> Replica:
        """Begin a stream of a replica with a new mailbox. The caller sends the wanted orders again."""
        replica = self.replicas.get(hello.replica_id)
        if replica is not None and replica.incarnation != hello.incarnation:
            again = f"replica {hello.replica_id} was started again elsewhere"
            self._end(replica, LeaseLostError(again, holder=hello.incarnation))
            replica = None
        if replica is None:
            replica = self._admit(hello.replica_id, hello.incarnation)
        if replica.mailbox is not None:
            replica.mailbox.close(SupersededError("the same replica opened a newer stream"))
        replica.mailbox = Mailbox(SPARE_COMMANDS + hello.num_slots)  # an order for each slot, at most
        replica.silent_since = None
        replica.num_slots = hello.num_slots
        replica.weights_address = hello.weights_address
        replica.held = dict(hello.held)
        replica.announced.clear()  # an announcement may have been lost
        replica.lease_until = self._clock() + self.lease_s
        self.takers += 1
        return replica

    def expect(self, replica_id: str, incarnation: str) -> Replica:
        """Register a replica that had work from an earlier orchestrator; the replica has one lease to come back."""
        replica = self.replicas.get(replica_id)
        if replica is None or replica.incarnation != incarnation:
            if replica is not None:
                self._end(replica, None)
            replica = self._admit(replica_id, incarnation)
        return replica

    def report(
        self,
        replica_id: str,
        incarnation: str,
        *,
        held: Mapping[str, Held],
        num_tokens: int,
        running: Iterable[str] | None = None,
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
        device_turn: int = 0,
    ) -> Replica:
        """Renew the lease.

        Raises:
            LeaseLostError: the lease ended, or a newer incarnation holds the lease; the replica must join again.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or replica.incarnation != incarnation:
            raise LeaseLostError(
                f"replica {replica_id} ({incarnation}) holds no lease: join again", replica_id=replica_id
            )
        now = self._clock()
        key = replica_id, incarnation
        known = self._sampled.get(key, num_tokens if self.resumed else 0)
        replica.new_tokens, self._sampled[key] = max(num_tokens - known, 0), num_tokens
        if replica.reported_at is not None and now > replica.reported_at:
            replica.tokens_per_s = replica.new_tokens / (now - replica.reported_at)
        replica.reported_at, replica.num_tokens = now, num_tokens
        replica.silent_since = None
        if held != replica.held:
            replica.held = dict(held)
            self.takers += 1
        replica.num_reports += 1
        replica.device_turn = device_turn
        replica.note_running(running)
        replica.accounts, replica.peers = accounts, peers
        replica.lease_until = now + self.lease_s
        return replica

    def prolong(self, seconds: float) -> None:
        """Extend all leases by the seconds during which this process did not run and received no reports."""
        for replica in self.replicas.values():
            replica.lease_until += seconds
            if replica.silent_since is not None:
                replica.silent_since += seconds

    def prolong_work(self, seconds: float) -> None:
        """Extend the time of all task groups by seconds in which no replica could compute."""
        for replica in self.replicas.values():
            for assignment in replica.assignments.values():
                assignment.since += seconds

    def stream_ended(self, replica: Replica, mailbox: Mailbox[ReplicaCommand]) -> None:
        """End a broken or closed stream; the lease continues, except for a drained replica without running slots."""
        if replica.mailbox is not mailbox:
            return
        replica.mailbox = None
        replica.silent_since = self._clock()
        self.takers += 1
        self._end_if_drained(replica)

    def give_away(self) -> list[Replica]:
        """Take the task groups from replicas with a broken stream and no report for two intervals; their leases
        continue. Returns these replicas."""
        before = self._clock() - max(REJOIN_S, 2 * self.report_every_s)
        silent = (r for r in self.replicas.values() if r.silent_since is not None and r.silent_since <= before)
        found = [replica for replica in silent if replica.assignments]
        for replica in found:
            self._orphan(replica)
        return found

    def expire(self) -> list[Replica]:
        """End the leases that have run out; returns their replicas."""
        now = self._clock()
        lost = [replica for replica in self.replicas.values() if replica.lease_until <= now]
        for replica in lost:
            self._end(replica, LeaseLostError(f"replica {replica.replica_id} did not report for {self.lease_s} s"))
        return lost

    def drain_all(self, reason: str) -> None:
        """Stop all work: no replica gets orders, and every replica may leave."""
        for replica in self:
            replica.draining = True
            self.takers += 1
            self.send(replica, LeavePool(reason))

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for replica in self.replicas.values():
            if replica.mailbox is not None:
                replica.mailbox.close()

    def _admit(self, replica_id: str, incarnation: str) -> Replica:
        replica = Replica(replica_id=replica_id, incarnation=incarnation, lease_until=self._clock() + self.lease_s)
        self.replicas[replica_id] = replica
        self._met[replica_id, incarnation] = None
        if len(self._met) > MOST_MET:
            del self._met[next(iter(self._met))]
        return replica

    def _end(self, replica: Replica, error: LeaseLostError | None) -> None:
        del self.replicas[replica.replica_id]
        if replica.mailbox is not None:
            replica.mailbox.close(error)
            replica.mailbox = None
        self.takers += 1
        self._orphan(replica)

    def _orphan(self, replica: Replica) -> None:
        """Mark the task groups of this replica as orphaned."""
        orphans = list(replica.assignments)
        for task_group_id in orphans:
            replica.drop(task_group_id)
            del self._owners[task_group_id]
        if orphans:
            self.on_orphaned(orphans)

    # --- work --------------------------------------------------------------------------------------------------------

    def assign(self, replica: Replica, group: TaskGroup) -> None:
        """Give the open slots of a task group to a replica."""
        assert group.id not in self._owners
        slots, evaluates = set(group.unresolved), not group.is_training
        replica.assignments[group.id] = Assignment(
            open_slots=slots, since=self._clock(), pinned=group.order.required_versions, evaluates=evaluates
        )
        replica.num_running += len(slots)
        replica.num_evaluating += evaluates * len(slots)
        self._owners[group.id] = replica.replica_id
        group.owners.add(replica.key)

    def resolved(self, task_group_id: str, index: int) -> Replica | None:
        """Record the outcome of a slot from any replica; returns the replica that had the slot."""
        replica = self.owner(task_group_id)
        if replica is None:
            return None
        assignment = replica.assignments[task_group_id]
        if index in assignment.open_slots:
            assignment.open_slots.remove(index)
            replica.num_running -= 1
            replica.num_evaluating -= assignment.evaluates
        if not assignment.open_slots:
            self.release(task_group_id)
        return replica

    def release(self, task_group_id: str) -> Replica | None:
        """Take this task group from its replica; returns that replica."""
        replica = self.owner(task_group_id)
        if replica is not None:
            del self._owners[task_group_id]
            replica.drop(task_group_id)
            self._end_if_drained(replica)
        return replica

    def _end_if_drained(self, replica: Replica) -> None:
        """Remove a draining replica after its stream has ended and its slots are resolved."""
        gone = replica.draining and replica.mailbox is None and not replica.assignments
        if gone and self.replicas.get(replica.replica_id) is replica:
            self._end(replica, None)

    def send(self, replica: Replica, command: ReplicaCommand) -> bool:
        """Queue a command. A replica that does not read loses its stream, and gets every command again after a rejoin."""
        if replica.mailbox is None:
            return False
        if replica.mailbox.put(command):
            return True
        replica.mailbox.close(CapacityError("commands pile up unread: join again", retry_after_s=1.0))
        replica.mailbox = None
        self.takers += 1
        return False

    @property
    def tokens_per_s(self) -> float:
        return sum(replica.tokens_per_s for replica in self.replicas.values())

    @property
    def num_running(self) -> int:
        """Slots of all replicas."""
        return sum(replica.num_running for replica in self.replicas.values())


# --- The trainers: one lease per policy, and commands to the holder of each lease.


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What the holder of a policy's lease has reported."""

    policy: str
    incarnation: str
    num_ranks: int
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

    def note_checkpoints(self, newest: int, step: int, kept: Iterable[int]) -> None:
        """Note the newest and the kept durable checkpoints, up to the ledger's ``newest`` version.

        Retention may delete records up to a checkpoint: one ahead of the ledger belongs to another history, or to a version
        with a lost record.
        """
        self.checkpoint_step = max(self.checkpoint_step, min(step, newest))
        self.kept_checkpoint_steps = tuple(sorted(kept for kept in kept if 0 <= kept <= newest))


class TrainerLeases:
    def __init__(self, policies: Iterable[str], lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._trainers: dict[str, Trainer | None] = dict.fromkeys(policies)

    def __iter__(self) -> Iterator[Trainer]:
        return iter([trainer for trainer in self._trainers.values() if trainer is not None])

    def get(self, policy: str) -> Trainer | None:
        """The policy's trainer; None without one. Raises UnknownPolicyError."""
        if policy not in self._trainers:
            raise UnknownPolicyError(f"no policy {policy!r} in this run; it has {', '.join(self._trainers)}")
        return self._trainers[policy]

    def join(self, policy: str, incarnation: str, num_ranks: int) -> Trainer:
        """A stream of a trainer begins; a new incarnation ends the lease of the older one."""
        trainer = self.get(policy)
        if trainer is not None and trainer.mailbox is not None:
            if trainer.incarnation == incarnation:
                trainer.mailbox.close(SupersededError("the same trainer opened a newer stream"))
            else:
                trainer.mailbox.close(LeaseLostError(f"another trainer of {policy} has joined", holder=incarnation))
        if trainer is None or trainer.incarnation != incarnation:
            trainer = Trainer(policy=policy, incarnation=incarnation, num_ranks=num_ranks, lease_until=0.0)
            self._trainers[policy] = trainer
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

    def renew(self, policy: str, incarnation: str) -> Trainer:
        """The holder, whose lease is renewed by a report; raises LeaseLostError for an ended lease or another holder."""
        trainer = self.check(policy, incarnation)
        if trainer is None:
            raise LeaseLostError(f"the trainer of {policy} holds no lease: join again", policy=policy)
        trainer.num_reports += 1
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
                late = f"the trainer of {trainer.policy} did not report for {self.lease_s} s"
                trainer.mailbox.close(LeaseLostError(late))
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


# --- Checks of what members report. Identities, versions and counts affect decisions, so that an impossible value is refused
# with a reason; the size of a message bounds what is for display.


MOST_NAME = 128  # characters
MOST_NUMBER = 1 << 53  # of a version or a step
FUTURE_S = 3600.0  # by which a peer's clock may be ahead


def check_id(what: str, text: str) -> str:
    """Raises InvalidRequestError for an id that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        raise InvalidRequestError(f"{what} is {text[:MOST_NAME]!r}: it must have 1 to {MOST_NAME} printable characters")
    return text


def check_number(what: str, value: int, least: int, most: int = MOST_NUMBER) -> int:
    """Raises InvalidRequestError for a number outside its range."""
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}; it must be {least} to {most}")
    return value


def possible_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Those that are ordered, not before 1970 and not in the future of any clock."""
    latest = time.time() + FUTURE_S
    return [(begin, end) for begin, end in intervals if 0.0 <= begin <= end <= latest]

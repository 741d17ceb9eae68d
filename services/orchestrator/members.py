"""Replicas: the state of each, and the pool with its leases and the slots that each replica runs.

A replica is its own report and the ledger of the slots that the orchestrator gave to the replica. The ledger keeps
counters, so a choice among replicas does not sum over task groups. Independent of task groups.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.errors import CapacityError, LeaseLostError, RollmillError, SupersededError
from services.common.records import DeviceTurn, FetchPlan, TaskGroupOrder, WeightVersion
from services.common.telemetry.accounts import AccountState, Component, PeerState
from services.common.telemetry.accounts import replica as replica_component
from services.orchestrator.groups import Incarnation

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

    def __post_init__(self) -> None:
        self.component = replica_component(self.replica_id)

    @property
    def key(self) -> Incarnation:
        return self.replica_id, self.incarnation

    @property
    def num_free(self) -> int:
        """Free slots by the ledger; negative for a replica that came back with fewer slots than its running task groups
        need."""
        return self.num_slots - self.num_running

    @property
    def takes_work(self) -> bool:
        return self.mailbox is not None and not self.draining

    def fits(self, num_slots: int) -> bool:
        """Whether the replica has room for a whole task group, or is idle and the group is larger than the replica."""
        return self.num_free >= num_slots or not self.assignments

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

    def resolve(self, name: str, slot: int) -> bool:
        """Remove a resolved slot; returns whether no slot of the task group is open here."""
        assignment = self.assignments[name]
        if slot in assignment.open_slots:
            assignment.open_slots.remove(slot)
            self.count(assignment, -1)
        return not assignment.open_slots

    def drop(self, name: str) -> None:
        """Remove a task group from this replica."""
        assignment = self.assignments.pop(name)
        self.count(assignment, -len(assignment.open_slots))

    def count(self, assignment: Assignment, num_slots: int) -> None:
        self.num_running += num_slots
        if assignment.evaluates:
            self.num_evaluating += num_slots

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
        self._replicas: dict[str, Replica] = {}
        self._owners: dict[str, str] = {}  # task group -> replica id
        self._met: dict[Incarnation, None] = {}  # incarnations that ever joined, newest last; outlives leases
        self.takers = 0  # changes when other replicas take work, or they hold other versions or serve elsewhere

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def report_every_s(self) -> float:
        """Interval of a replica's reports: as short as the total rate allows, and several times in a lease."""
        seldom = min(len(self._replicas) / MOST_REPORTS_PER_S, MOST_REPORT_S, self.lease_s / 6)
        return max(REPORT_S, seldom)

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def workers(self) -> Iterator[Replica]:
        """The replicas that take work."""
        return (replica for replica in self._replicas.values() if replica.takes_work)

    def freest(self, num_slots: int, serves: Callable[[Replica], bool]) -> Replica | None:
        """The replica that ``serves`` with the most free slots, of several the one with the greatest id, of those that take
        work and have room for a task group of this many slots."""
        best: Replica | None = None
        for replica in self.workers():
            if best is not None and (replica.num_free, replica.replica_id) <= (best.num_free, best.replica_id):
                continue
            if replica.fits(num_slots) and serves(replica):
                best = replica
        return best

    def owner(self, task_group_id: str) -> Replica | None:
        name = self._owners.get(task_group_id)
        return None if name is None else self._replicas.get(name)

    def has_met(self, member: Incarnation) -> bool:
        """Whether this incarnation of a replica has ever joined, as far as this process knows."""
        return member in self._met

    # --- leases ------------------------------------------------------------------------------------------------------

    def join(self, hello: Hello) -> Replica:
        """Begin a stream of a replica with a new mailbox. The caller sends the wanted orders again."""
        replica = self._replicas.get(hello.replica_id)
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
        self._renew(replica)
        self.takers += 1
        return replica

    def expect(self, replica_id: str, incarnation: str) -> Replica:
        """Register a replica that had work from an earlier orchestrator; the replica has one lease to come back."""
        replica = self._replicas.get(replica_id)
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
        replica = self._replicas.get(replica_id)
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
        self._renew(replica)
        return replica

    def prolong(self, seconds: float) -> None:
        """Extend all leases by the seconds during which this process did not run and received no reports."""
        for replica in self._replicas.values():
            replica.lease_until += seconds
            if replica.silent_since is not None:
                replica.silent_since += seconds

    def prolong_work(self, seconds: float) -> None:
        """Extend the time of all task groups by seconds in which no replica could compute."""
        for replica in self._replicas.values():
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
        silent = (r for r in self._replicas.values() if r.silent_since is not None and r.silent_since <= before)
        found = [replica for replica in silent if replica.assignments]
        for replica in found:
            self._orphan(replica)
        return found

    def expire(self) -> list[Replica]:
        """End the leases that have run out; returns their replicas."""
        now = self._clock()
        lost = [replica for replica in self._replicas.values() if replica.lease_until <= now]
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
        for replica in self._replicas.values():
            if replica.mailbox is not None:
                replica.mailbox.close()

    def _admit(self, replica_id: str, incarnation: str) -> Replica:
        replica = Replica(replica_id=replica_id, incarnation=incarnation, lease_until=self._clock() + self.lease_s)
        self._replicas[replica_id] = replica
        self._met[replica_id, incarnation] = None
        if len(self._met) > MOST_MET:
            del self._met[next(iter(self._met))]
        return replica

    def _renew(self, replica: Replica) -> None:
        replica.lease_until = self._clock() + self.lease_s

    def _end(self, replica: Replica, error: LeaseLostError | None) -> None:
        del self._replicas[replica.replica_id]
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

    def assign(
        self,
        replica: Replica,
        task_group_id: str,
        slots: Iterable[int],
        pinned: Mapping[str, int],
        *,
        evaluates: bool = False,
    ) -> None:
        assert task_group_id not in self._owners
        assignment = Assignment(open_slots=set(slots), since=self._clock(), pinned=pinned, evaluates=evaluates)
        replica.assignments[task_group_id] = assignment
        replica.count(assignment, len(assignment.open_slots))
        self._owners[task_group_id] = replica.replica_id

    def resolved(self, task_group_id: str, index: int) -> Replica | None:
        """Record the outcome of a slot from any replica; returns the replica that had the slot."""
        replica = self.owner(task_group_id)
        if replica is None:
            return None
        if replica.resolve(task_group_id, index):
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
        if gone and self._replicas.get(replica.replica_id) is replica:
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

    def tell(self, replica: Replica, version: AnnounceVersion) -> None:
        """Queue the announcement of a version."""
        replica.announced[version.version.policy] = version.version.number, self._clock()
        self.send(replica, version)

    @property
    def tokens_per_s(self) -> float:
        return sum(replica.tokens_per_s for replica in self._replicas.values())

    @property
    def num_running(self) -> int:
        """Slots of all replicas."""
        return sum(replica.num_running for replica in self._replicas.values())

"""The replicas: who is there, until when, what they hold, and which slots of which task groups they play.

A lease is renewed by reports and outlives a broken stream, so a replica that reconnects in time loses nothing. One whose
stream broke and that is silent afterwards was killed, most likely: its task groups are given to others after ``REJOIN_S``, and
what it may still bring of them counts if it is the first. A new incarnation of a replica ends the lease of the older one at once. Time comes from a clock that is passed in.
Knows nothing about grpc, the journal, or what task groups are for beyond the versions that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from services.common.accounts import AccountState, PeerState
from services.common.errors import CapacityError, LeaseLostError, NotFoundError, SupersededError
from services.orchestrator.commands import LeavePool, ReplicaCommand
from services.orchestrator.groups import Incarnation
from services.orchestrator.mailbox import Mailbox

REJOIN_S = 4.0  # a replica that lives tries to rejoin within a fraction of a second, and reports every 2 s
MOST_MET = 65_536  # incarnations that are remembered
SPARE_COMMANDS = 1024  # on their way to a replica beside the orders that it has room for


@dataclass(frozen=True, slots=True)
class Held:
    """A policy's weights in a replica; -1 when none are loaded."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How a replica introduces itself."""

    replica_id: str
    incarnation: str
    num_slots: int
    held: Mapping[str, Held]
    running: tuple[str, ...] = ()  # task groups that it is playing
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""


@dataclass(slots=True, kw_only=True)
class Assignment:
    """Slots of one task group at one replica."""

    open_slots: set[int]
    since: float
    pinned: Mapping[str, int]  # versions that must not change meanwhile (evaluation)
    issued: bool = False  # durable: the order may be sent
    seen: bool = False  # the replica has said that it plays it
    num_unseen: int = 0  # reports since it was issued that did not


@dataclass(slots=True, kw_only=True)
class Replica:
    replica_id: str
    incarnation: str
    lease_until: float
    num_slots: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""
    mailbox: Mailbox[ReplicaCommand] | None = None  # None while its stream is broken
    silent_since: float | None = None  # its stream broke then, and it has not been heard of since
    draining: bool = False
    assignments: dict[str, Assignment] = field(default_factory=dict)
    announced: dict[str, tuple[int, float]] = field(default_factory=dict)  # policy -> (version, when)
    num_tokens: int = 0
    new_tokens: int = 0  # between the newest report and the one before
    tokens_per_s: float = 0.0
    reported_at: float | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)
    num_reports: int = 0
    accounts: tuple[AccountState, ...] = ()
    peers: tuple[PeerState, ...] = ()  # what it depends on, as it sees it

    @property
    def key(self) -> Incarnation:
        return self.replica_id, self.incarnation

    @property
    def num_running(self) -> int:
        return sum(len(a.open_slots) for a in self.assignments.values())

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_running

    @property
    def takes_work(self) -> bool:
        return self.mailbox is not None and not self.draining

    def note_running(self, task_group_ids: Iterable[str] | None) -> None:
        """The task groups that it says it plays; None from one that does not say."""
        if task_group_ids is None:
            return
        said = frozenset(task_group_ids)
        for name, assignment in self.assignments.items():
            if assignment.issued:
                assignment.seen = assignment.seen or name in said
                assignment.num_unseen += not assignment.seen

    def fits(self, num_slots: int) -> bool:
        """A whole task group, or one that is larger than the replica when nothing else runs there."""
        return self.num_free >= num_slots or not self.assignments

    def is_moving(self, policy: str) -> bool:
        """Whether it was told of a newer version than the one that it says it holds."""
        held = self.held.get(policy)
        return held is not None and self.announced.get(policy, (-1, 0.0))[0] > held.number

    def pinned_version(self, policy: str) -> int | None:
        """The version that an evaluation keeps in place."""
        return next((a.pinned[policy] for a in self.assignments.values() if policy in a.pinned), None)


class ReplicaPool:
    def __init__(
        self, lease_s: float, clock: Callable[[], float], on_orphaned: Callable[[list[str]], None] = lambda groups: None
    ) -> None:
        """``on_orphaned`` is told task groups whose open slots nobody plays any more."""
        self.lease_s = lease_s
        self._clock = clock
        self._on_orphaned = on_orphaned
        self.resumed = False  # an earlier process may have counted what replicas sampled before their first report here
        self._sampled: dict[tuple[str, str], int] = {}  # tokens, by replica and incarnation; outlives leases
        self._replicas: dict[str, Replica] = {}
        self._owners: dict[str, str] = {}  # task group -> replica id
        self._met: dict[Incarnation, None] = {}  # who has ever joined, newest last; outlives leases

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def owner(self, task_group_id: str) -> Replica | None:
        name = self._owners.get(task_group_id)
        return None if name is None else self._replicas.get(name)

    def has_met(self, replica_id: str, incarnation: str) -> bool:
        """Whether this incarnation of a replica has ever joined, as far as this process knows."""
        return (replica_id, incarnation) in self._met

    # --- leases ------------------------------------------------------------------------------------------------------

    def join(self, hello: Hello) -> Replica:
        """A stream of a replica begins. Its mailbox is new; the caller sends again what is still wanted of it."""
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
        replica.held = dict(hello.held)
        replica.labels = hello.labels
        replica.weights_address = hello.weights_address
        replica.announced.clear()
        self._renew(replica)
        return replica

    def expect(self, replica_id: str, incarnation: str) -> Replica:
        """A replica that an earlier orchestrator had given work: it has one lease to come back."""
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
        gauges: Mapping[str, float],
        running: Iterable[str] | None = None,
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
    ) -> Replica:
        """Renew the lease.

        Raises:
            LeaseLostError: it has run out, or a newer incarnation holds it; join again.
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
        replica.held = dict(held)
        replica.gauges = gauges
        replica.num_reports += 1
        replica.note_running(running)
        replica.accounts, replica.peers = accounts, peers
        self._renew(replica)
        return replica

    def prolong(self, seconds: float) -> None:
        """Leases do not run while nobody here listens: this process itself stood still."""
        for replica in self._replicas.values():
            replica.lease_until += seconds
            if replica.silent_since is not None:
                replica.silent_since += seconds

    def stream_ended(self, replica: Replica, mailbox: Mailbox[ReplicaCommand]) -> None:
        """A stream broke or was closed; the lease goes on, except for a drained replica with nothing left to play."""
        if replica.mailbox is not mailbox:
            return
        replica.mailbox = None
        replica.silent_since = self._clock()
        self._end_if_drained(replica)

    def give_away(self) -> list[Replica]:
        """Take the task groups from replicas whose stream broke ``REJOIN_S`` ago, and that were silent since; their leases go
        on. Returns these replicas."""
        before = self._clock() - REJOIN_S
        found = [r for r in self if r.silent_since is not None and r.silent_since <= before and r.assignments]
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

    def drain(self, replica_id: str, reason: str) -> None:
        """Raises NotFoundError when it is not in the pool."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            known = ", ".join(sorted(self._replicas)) or "none"
            raise NotFoundError(f"no replica {replica_id!r} in the pool; there are: {known}")
        replica.draining = True
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
        self._orphan(replica)

    def _orphan(self, replica: Replica) -> None:
        """Nobody plays its task groups any more."""
        orphans = list(replica.assignments)
        for task_group_id in orphans:
            del self._owners[task_group_id]
        replica.assignments.clear()
        if orphans:
            self._on_orphaned(orphans)

    # --- work --------------------------------------------------------------------------------------------------------

    def assign(self, replica: Replica, task_group_id: str, slots: Iterable[int], pinned: Mapping[str, int]) -> None:
        assert task_group_id not in self._owners
        replica.assignments[task_group_id] = Assignment(open_slots=set(slots), since=self._clock(), pinned=pinned)
        self._owners[task_group_id] = replica.replica_id

    def resolved(self, task_group_id: str, index: int) -> Replica | None:
        """A slot has its outcome, whoever played it; returns the replica that it was assigned to."""
        replica = self.owner(task_group_id)
        if replica is None:
            return None
        assignment = replica.assignments[task_group_id]
        assignment.open_slots.discard(index)
        if not assignment.open_slots:
            self.release(task_group_id)
        return replica

    def release(self, task_group_id: str) -> Replica | None:
        """Nobody is to play this task group any more; returns who was."""
        replica = self.owner(task_group_id)
        if replica is not None:
            del self._owners[task_group_id]
            del replica.assignments[task_group_id]
            self._end_if_drained(replica)
        return replica

    def _end_if_drained(self, replica: Replica) -> None:
        """A draining replica has left when its stream has ended and nothing of it is outstanding."""
        gone = replica.draining and replica.mailbox is None and not replica.assignments
        if gone and self._replicas.get(replica.replica_id) is replica:
            self._end(replica, None)

    def send(self, replica: Replica, command: ReplicaCommand) -> bool:
        """Queue a command. A replica that does not read loses its stream; it gets everything again when it rejoins."""
        if replica.mailbox is None:
            return False
        if replica.mailbox.put(command):
            return True
        replica.mailbox.close(CapacityError("commands pile up unread: join again", retry_after_s=1.0))
        replica.mailbox = None
        return False

    @property
    def tokens_per_s(self) -> float:
        return sum(replica.tokens_per_s for replica in self._replicas.values())

    @property
    def num_running(self) -> int:
        return sum(replica.num_running for replica in self._replicas.values())

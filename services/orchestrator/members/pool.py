"""The replica pool: leases, held versions, and the slots of task groups that each replica runs.

Reports renew a lease. A lease outlives a broken stream, so a replica that reconnects in time keeps its work. A replica
with a broken stream and no report for two intervals was probably killed: the pool gives its task groups to other
replicas and still accepts its records if they arrive first. A new incarnation of a replica ends the lease of the older
one. The caller passes the clock in. Independent of grpc and the journal; of a task group the pool knows the required
versions only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from services.common.errors import CapacityError, LeaseLostError, SupersededError
from services.common.telemetry.accounts import AccountState, PeerState
from services.orchestrator.members.commands import AnnounceVersion, LeavePool, Mailbox, ReplicaCommand
from services.orchestrator.members.replica import Assignment, FreeSlots, Held, Hello, Replica, Shelf
from services.orchestrator.state.groups import Incarnation

REPORT_S = 2.0  # between two reports of a replica
MOST_REPORTS_PER_S = 200.0  # of all replicas: a larger pool reports less often
MOST_REPORT_S = 5.0  # and never less often than this
# At least: a live replica tries to rejoin within a fraction of a second, and has reported twice by then.
REJOIN_S = 4.0
MOST_MET = 65_536  # incarnations that are remembered
SPARE_COMMANDS = 1024  # on their way to a replica, beside the orders for its slots


class ReplicaPool:
    def __init__(
        self, lease_s: float, clock: Callable[[], float], on_orphaned: Callable[[list[str]], None] = lambda groups: None
    ) -> None:
        """``on_orphaned`` receives task groups with open slots that no replica runs."""
        self.lease_s = lease_s
        self._clock = clock
        self._on_orphaned = on_orphaned
        self.resumed = False  # an earlier process may have counted the samples before the first report here
        self._sampled: dict[tuple[str, str], int] = {}  # tokens, by replica and incarnation; outlives leases
        self._replicas: dict[str, Replica] = {}
        self._owners: dict[str, str] = {}  # task group -> replica id
        self._met: dict[Incarnation, None] = {}  # incarnations that ever joined, newest last; outlives leases
        # Of the replicas that take work; ``_changed`` keeps them right.
        self.free = FreeSlots()
        self.free_of_evaluations = FreeSlots(by_evaluating=True)
        self.num_running = 0  # slots of all replicas
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

    def freest(self, num_slots: int, serves: Callable[[Shelf], bool], without: Collection[str] = ()) -> Replica | None:
        """The replica with the most free slots on a shelf that ``serves``, of the replicas that take work and have this
        many free slots or no running slots."""
        name = self.free.freest(num_slots, serves, without)
        return None if name is None else self._replicas[name]

    def owner(self, task_group_id: str) -> Replica | None:
        name = self._owners.get(task_group_id)
        return None if name is None else self._replicas.get(name)

    def has_met(self, replica_id: str, incarnation: str) -> bool:
        """Whether this incarnation of a replica has ever joined, as far as this process knows."""
        return (replica_id, incarnation) in self._met

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
        replica.labels = hello.labels
        replica.weights_address = hello.weights_address
        replica.hold(hello.held)
        replica.untell()
        self._renew(replica)
        self._takes_other_work(replica)
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
        gauges: Mapping[str, float],
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
            replica.hold(held)
            self._takes_other_work(replica)
        replica.gauges = gauges
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
            replica.prolong_work(seconds)

    def stream_ended(self, replica: Replica, mailbox: Mailbox[ReplicaCommand]) -> None:
        """End a broken or closed stream; the lease continues, except for a drained replica without running slots."""
        if replica.mailbox is not mailbox:
            return
        replica.mailbox = None
        replica.silent_since = self._clock()
        self._takes_other_work(replica)
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
            self._takes_other_work(replica)
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
        self._takes_other_work(replica)
        self._orphan(replica)

    def _orphan(self, replica: Replica) -> None:
        """Mark the task groups of this replica as orphaned."""
        self.num_running -= replica.num_running
        orphans = replica.drop_all()
        for task_group_id in orphans:
            del self._owners[task_group_id]
        self._changed(replica)
        if orphans:
            self._on_orphaned(orphans)

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
        replica.take(task_group_id, assignment)
        self._owners[task_group_id] = replica.replica_id
        self.num_running += len(assignment.open_slots)
        self._changed(replica)

    def resolved(self, task_group_id: str, index: int) -> Replica | None:
        """Record the outcome of a slot from any replica; returns the replica that had the slot."""
        replica = self.owner(task_group_id)
        if replica is None:
            return None
        before = replica.num_running
        is_over = replica.resolve(task_group_id, index)
        self.num_running -= before - replica.num_running
        if is_over:
            self.release(task_group_id)
        else:
            self._changed(replica)
        return replica

    def release(self, task_group_id: str) -> Replica | None:
        """Take this task group from its replica; returns that replica."""
        replica = self.owner(task_group_id)
        if replica is not None:
            del self._owners[task_group_id]
            before = replica.num_running
            replica.drop(task_group_id)
            self.num_running -= before - replica.num_running
            self._changed(replica)
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
        self._takes_other_work(replica)
        return False

    def tell(self, replica: Replica, version: AnnounceVersion) -> None:
        """Queue the announcement of a version."""
        replica.tell(version.version.policy, version.version.number, self._clock())
        self._changed(replica)
        self.send(replica, version)

    # --- consequences of a change -------------------------------------------------------------------------------------

    def _changed(self, replica: Replica) -> None:
        """Update the indexes of free replicas after a change of this replica."""
        if self._replicas.get(replica.replica_id, replica) is not replica:
            return  # an older incarnation: the place is of the newer one
        self.free.place(replica)
        self.free_of_evaluations.place(replica)

    def _takes_other_work(self, replica: Replica) -> None:
        """Note a change of a replica's availability or held versions."""
        self.takers += 1
        self._changed(replica)

    @property
    def tokens_per_s(self) -> float:
        return sum(replica.tokens_per_s for replica in self._replicas.values())

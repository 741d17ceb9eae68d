"""State of one replica, and the index of all replicas that take work by their free slots.

A replica is its own report and the ledger of the slots that the orchestrator gave to the replica. The ledger keeps
counters, so a query for each trajectory does not sum over task groups. The orchestrator compares the reported number of
free slots with its ledger and logs a difference; only the ledger decides about new orders.

The index goes by held versions and number of free slots:

    shelf (replicas with the same key)  ->  [(free slots, replica id), ...] in ascending order

Shelves are few for any number of replicas: replicas hold one of a few versions. The freest replica that fits is the
last of a shelf, so a choice costs one step per shelf, and a change of a replica a binary search. The index places a
changed replica at the next choice, once for any number of changes: a commit of the journal resolves many slots of one
replica. Independent of task groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.components import Component
from services.common.telemetry.components import replica as replica_component
from services.orchestrator.members.commands import Mailbox, ReplicaCommand
from services.orchestrator.state.groups import Incarnation

Holdings = tuple[tuple[str, int, str], ...]  # (policy, version, digest), by policy

_Place = tuple[int, str]  # free slots, replica id: the greatest is chosen


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
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""


@dataclass(slots=True, kw_only=True)
class Assignment:
    """Slots of one task group at one replica."""

    open_slots: set[int]
    since: float
    pinned: Mapping[str, int]  # versions that must not change meanwhile (evaluation)
    evaluates: bool = False
    issued: bool = False  # durable: the order may be sent
    num_unseen: int = 0  # reports since the issue without this task group


@dataclass(slots=True, kw_only=True)
class Replica:
    """``assignments``, ``held`` and ``announced`` change only through methods: the methods also update derived values."""

    replica_id: str
    incarnation: str
    lease_until: float
    num_slots: int = 0
    held: Mapping[str, Held] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""
    mailbox: Mailbox[ReplicaCommand] | None = None  # None while its stream is broken
    silent_since: float | None = None  # time at which the stream broke, without a report since
    draining: bool = False
    assignments: dict[str, Assignment] = field(default_factory=dict)
    num_running: int = 0  # open slots of all assignments
    num_evaluating: int = 0  # of these, of evaluations
    announced: dict[str, tuple[int, float]] = field(default_factory=dict)  # policy -> (version, when)
    holdings: Holdings = ()  # ``held``, to compare replicas by
    moving: tuple[str, ...] = ()  # policies with an announced version newer than the held one
    num_tokens: int = 0
    new_tokens: int = 0  # between the newest report and the one before
    tokens_per_s: float = 0.0
    reported_at: float | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)
    num_reports: int = 0
    device_turn: int = 0  # the newest that the replica has carried out
    accounts: tuple[AccountState, ...] = ()
    peers: tuple[PeerState, ...] = ()  # state of its dependencies, as the replica reports them
    component: Component = field(init=False)  # its name in accounts and stalls
    _pinning: dict[str, None] = field(default_factory=dict)  # assignments with pinned versions, in order
    _unseen: dict[str, None] = field(default_factory=dict)  # assignments that the replica has never confirmed

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

    def hold(self, held: Mapping[str, Held]) -> None:
        """Record the versions that the replica reports as held."""
        if held != self.held:
            self.held = dict(held)
            self.holdings = tuple(sorted((policy, found.number, found.digest) for policy, found in held.items()))
            self._note_moving()

    def tell(self, policy: str, number: int, now: float) -> None:
        """Record an announced version."""
        self.announced[policy] = (number, now)
        self._note_moving()

    def untell(self) -> None:
        """Forget announced versions: the announcement may have been lost."""
        self.announced.clear()
        self._note_moving()

    def _note_moving(self) -> None:
        told = self.announced.items()
        self.moving = tuple(
            sorted(p for p, (number, _) in told if (held := self.held.get(p)) is not None and number > held.number)
        )

    def pinned_version(self, policy: str) -> int | None:
        """The version that an evaluation pins."""
        pinned = (self.assignments[name].pinned for name in self._pinning)
        return next((versions[policy] for versions in pinned if policy in versions), None)

    # --- the ledger --------------------------------------------------------------------------------------------------

    def take(self, name: str, assignment: Assignment) -> None:
        self.assignments[name] = assignment
        self._unseen[name] = None
        if assignment.pinned:
            self._pinning[name] = None
        self._count(assignment, len(assignment.open_slots))

    def resolve(self, name: str, slot: int) -> bool:
        """Remove a resolved slot; returns whether no slot of the task group is open here."""
        assignment = self.assignments[name]
        if slot in assignment.open_slots:
            assignment.open_slots.remove(slot)
            self._count(assignment, -1)
        return not assignment.open_slots

    def drop(self, name: str) -> None:
        """Remove a task group from this replica."""
        assignment = self.assignments.pop(name)
        self._unseen.pop(name, None)
        self._pinning.pop(name, None)
        self._count(assignment, -len(assignment.open_slots))

    def drop_all(self) -> list[str]:
        """Remove all task groups from this replica; returns them."""
        names = list(self.assignments)
        for name in names:
            self.drop(name)
        return names

    def given_before(self, moment: float) -> list[str]:
        """The task groups that the replica was given before this moment, in the order of their issue."""
        given = takewhile(lambda item: item[1].since < moment, self.assignments.items())
        return [name for name, _ in given]

    def prolong_work(self, seconds: float) -> None:
        """Do not count these seconds against its task groups: the replica could not compute."""
        for assignment in self.assignments.values():
            assignment.since += seconds

    def _count(self, assignment: Assignment, num_slots: int) -> None:
        self.num_running += num_slots
        if assignment.evaluates:
            self.num_evaluating += num_slots

    # --- reported task groups ----------------------------------------------------------------------------------------

    def note_running(self, task_group_ids: Iterable[str] | None) -> None:
        """Compare the reported task groups with the assigned ones; None for a replica that does not report them."""
        if task_group_ids is None or not self._unseen:
            return
        said = frozenset(task_group_ids)
        for name in list(self._unseen):
            assignment = self.assignments[name]
            if not assignment.issued:
                continue
            if name in said:
                del self._unseen[name]
            else:
                assignment.num_unseen += 1

    def unseen(self, num_reports: int) -> list[Assignment]:
        """Task groups that this many reports or more did not contain."""
        if not self._unseen:
            return []
        return [found for name in self._unseen if (found := self.assignments[name]).num_unseen >= num_reports]


class ShelfKey(NamedTuple):
    """Common properties of the replicas on a shelf."""

    holdings: Holdings
    moving: tuple[str, ...]  # policies of which they were told a newer version than they hold
    idle: bool  # no slot is assigned
    num_slots: int  # this and the next are 0 where shelves do not go by them
    num_evaluating: int


@dataclass(slots=True, kw_only=True)
class Shelf:
    alike: ShelfKey
    held: Mapping[str, Held]
    places: list[_Place] = field(default_factory=list)


class FreeSlots:
    def __init__(self, *, by_evaluating: bool = False) -> None:
        """``by_evaluating``: the number of slots, and of slots in evaluations, are part of the shelf's key."""
        self._by_evaluating = by_evaluating
        self._shelves: dict[ShelfKey, Shelf] = {}
        self._places: dict[str, tuple[Shelf, _Place]] = {}
        self._changed: dict[str, Replica] = {}  # not in their places yet
        self.num_placed = 0  # how often a replica was put into a place

    def __len__(self) -> int:
        self._settle()
        return len(self._places)

    def __contains__(self, replica_id: str) -> bool:
        self._settle()
        return replica_id in self._places

    def shelves(self) -> Iterator[Shelf]:
        """The shelves that are not empty."""
        self._settle()
        return iter(self._shelves.values())

    def place(self, replica: Replica) -> None:
        """Mark a replica for its new place, found at the next choice; a replica that takes no work has none."""
        if replica.takes_work:
            self._changed[replica.replica_id] = replica
        else:
            self.remove(replica.replica_id)

    def _settle(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, {}
            for replica in changed.values():
                self._put(replica)

    def _put(self, replica: Replica) -> None:
        known = self._places.get(replica.replica_id)
        alike = self._alike(replica)
        place = (replica.num_free, replica.replica_id)
        if known is not None:
            if known[1] == place and known[0].alike == alike:
                return
            self._take_out(replica.replica_id)
        self.num_placed += 1
        shelf = self._shelves.get(alike)
        if shelf is None:
            shelf = self._shelves[alike] = Shelf(alike=alike, held=replica.held)
        insort(shelf.places, place)
        self._places[replica.replica_id] = shelf, place

    def remove(self, replica_id: str) -> None:
        """Take a replica out; ignores a replica without a place."""
        self._changed.pop(replica_id, None)
        self._take_out(replica_id)

    def _take_out(self, replica_id: str) -> None:
        found = self._places.pop(replica_id, None)
        if found is None:
            return
        shelf, place = found
        del shelf.places[bisect_left(shelf.places, place)]
        if not shelf.places:
            del self._shelves[shelf.alike]

    def freest(self, num_slots: int, serves: Callable[[Shelf], bool], without: Collection[str] = ()) -> str | None:
        """The replica with the most free slots, of several the one with the greatest id, that has ``num_slots`` free or
        is idle, on a shelf that ``serves``."""
        self._settle()
        best: _Place | None = None
        for shelf in self._shelves.values():
            if (best is not None and shelf.places[-1] <= best) or not serves(shelf):
                continue
            found = _last(shelf, num_slots, without)
            if found is not None and (best is None or found > best):
                best = found
        return None if best is None else best[1]

    def _alike(self, replica: Replica) -> ShelfKey:
        return ShelfKey(
            replica.holdings,
            replica.moving,
            not replica.assignments,
            replica.num_slots if self._by_evaluating else 0,
            replica.num_evaluating if self._by_evaluating else 0,
        )


def _last(shelf: Shelf, num_slots: int, without: Collection[str]) -> _Place | None:
    for place in reversed(shelf.places):
        if place[0] < num_slots and not shelf.alike.idle:
            return None
        if place[1] not in without:
            return place
    return None

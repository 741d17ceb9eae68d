"""Who plays what: orphaned task groups first, then evaluation, then new training groups while the quota has room.

    pump():  [orphans] -> [evaluation] -> [training, admission open] -> replica with the most free slots
             -> journal the issue -> durable -> command to the replica

Whole task groups go to the replica with the most free slots, so a slow one never blocks another. An order is sent only
once its issue is durable. A replica that does not hold versions known to the ledger gets no work. Never waits: ``pump``
is called whenever something changed, and ``waits_for`` says what it lacks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import structlog

from services.common.config.data import EvaluationConfig
from services.common.types import TaskGroupOrder
from services.orchestrator.admission import Admission
from services.orchestrator.announcer import Announcer
from services.orchestrator.commands import CancelGroup, PlayGroup
from services.orchestrator.evaluation import Evaluations
from services.orchestrator.evaluators import Evaluators
from services.orchestrator.experience import Experience
from services.orchestrator.fanout import FanOut
from services.orchestrator.groups import TaskGroup
from services.orchestrator.journal import records
from services.orchestrator.journal.records import GroupRecord
from services.orchestrator.journal.writer import Journal
from services.orchestrator.orders import TrainingOrders
from services.orchestrator.pool import Replica, ReplicaPool
from services.orchestrator.versions import VersionLedger

log = structlog.get_logger()

MOST_CANCELLED = (
    512  # task groups of an earlier run or process, at once: half of the commands that a stream has room for
)


class Dispatcher:
    def __init__(
        self,
        *,
        pool: ReplicaPool,
        groups: dict[str, TaskGroup],
        experience: Experience,
        ledgers: Mapping[str, VersionLedger],
        max_staleness: Mapping[str, int],
        teachers: Mapping[str, str],
        training: TrainingOrders,
        evaluations: Evaluations,
        evaluation: EvaluationConfig,
        journal: Journal,
        counters: Counter[str],
        fanout: FanOut,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._experience = experience
        self._ledgers = ledgers
        self._max_staleness = max_staleness
        self._teachers = teachers
        self._training = training
        self._evaluations = evaluations
        self.evaluators = Evaluators(
            evaluation, evaluations, pool, groups, self.may_play, lambda policy: ledgers[policy].newest_number
        )
        self._journal = journal
        self._counters = counters
        self.announcer = Announcer(pool, ledgers, self.evaluators, fanout, counters, clock)
        self._orphans: dict[str, None] = {}  # task groups with open slots that nobody plays, in order
        self._scheduled = False
        self.train = False  # training groups may be issued
        self._holds: dict[str, str] = {}  # why nothing at all may be issued
        self.waits_for = ""

    @property
    def _admission(self) -> Admission:
        return self._experience.admission

    @property
    def holds(self) -> Mapping[str, str]:
        """Why nothing at all may be issued, by name."""
        return self._holds

    @property
    def held_back(self) -> str:
        """Why nothing at all may be issued; empty when something may."""
        return next(iter(self._holds.values()), "")

    def hold(self, name: str, reason: str) -> None:
        """Issue nothing while ``reason`` is not empty; several holds may be on at once."""
        if self._holds.get(name, "") == reason:
            return
        if reason:
            self._holds[name] = reason
        else:
            del self._holds[name]
        log.info("dispatch.hold", hold=name, reason=reason or "released")
        self.schedule()

    def schedule(self) -> None:
        """Pump soon, once, however many things changed."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled_pump)

    def _scheduled_pump(self) -> None:
        self._scheduled = False
        self.pump()

    def pump(self) -> None:
        """Issue everything that can be issued now."""
        self.waits_for = self.held_back or self._issue()

    def _issue(self) -> str:
        if not any(replica.takes_work for replica in self._pool):
            return "no replica has joined" if not len(self._pool) else "no replica takes work"
        wait = self._issue_orphans()
        wait = self._issue_evaluations() or wait
        return self._issue_training() or wait

    def _issue_evaluations(self) -> str:
        for current in self._evaluations:
            while current.has_left:
                if wait := self.evaluators.place(current, self.train):
                    return f"evaluation {current.name}: {wait}"
                if not self._evaluations.has_room(current):
                    return f"evaluation {current.name}: evaluation.max_in_flight trajectories are played"
                replica = _freest(self.evaluators.usable(current, current.next_samples))
                if replica is None:
                    return f"evaluation {current.name}: no free replica holds {_versions(current.versions)}"
                self._issue_to(self._evaluations.draw(current), replica)
        return ""

    def _issue_orphans(self) -> str:
        wait = ""
        for name in list(self._orphans):
            group = self._groups.get(name)
            if group is None or group.complete:
                del self._orphans[name]
                continue
            replica = _freest(self._usable(group.order, len(group.unresolved)))
            if replica is None:
                wait = f"no free replica for task group {name}"
                continue
            del self._orphans[name]
            self._pool.assign(replica, name, group.unresolved, group.order.required_versions)
            group.owners.add(replica.key)
            self._counters["slots_reissued"] += len(group.unresolved)
            born = self._born(replica, group.order.policies)
            if group.is_training:
                self._experience.reissued(group, born)
            record = records.assignment_to_json(name, replica.replica_id, replica.incarnation, born)
            self._journal.submit(records.ASSIGNMENT, name, record.copy, self._send_when_durable(name))
        return wait

    def _issue_training(self) -> str:
        if not self.train:
            return ""
        reserved = self.evaluators.reserved()
        wait = ""
        while True:
            # Whoever has used the least of its quota first: no policy waits for another's appetite.
            for policies in sorted(self._training.compositions, key=self._fullness):
                issued, reason = self._issue_training_group(policies, reserved)
                if issued:
                    break
                wait = reason or wait
            else:
                return wait or self._full_quotas()

    def _issue_training_group(self, policies: tuple[str, ...], reserved: frozenset[str]) -> tuple[bool, str]:
        """Issue one task group of these policies; whether that was possible, and what it waits for."""
        if not self._admission.open(self._all(policies)):
            return False, ""
        size = self._training.group_size
        free = [r for r in self._pool if r.takes_work and r.fits(size) and r.replica_id not in reserved]
        usable = [r for r in free if self.may_play(r, {}, policies)]
        if not usable:
            return False, self._why_no_replica(size, policies)
        replica = _freest(r for r in usable if self._admission.open(self._all(policies), self._lags(r, policies)))
        if replica is None:
            return False, "the quota has room only for replicas that hold newer versions"
        group = self._training.next_group(policies)
        group.born = self._born(replica, policies)
        self._experience.issued(group)
        self._issue_to(group, replica)
        return True, ""

    def _all(self, policies: tuple[str, ...]) -> tuple[str, ...]:
        """Those of them that are trained; no policy named is all of the run."""
        return tuple(policy for policy in policies or self._ledgers if policy in self._max_staleness)

    def _served(self, policies: tuple[str, ...]) -> tuple[str, ...]:
        """What a replica needs for rollouts of these policies: a teacher scores without being named."""
        taught_by = [self._teachers[policy] for policy in policies if policy in self._teachers]
        return (*policies, *taught_by) or tuple(self._ledgers)

    def _fullness(self, policies: tuple[str, ...]) -> float:
        return max(self._admission.accounts[policy].fullness for policy in self._all(policies))

    def _full_quotas(self) -> str:
        full = [
            f"{policy}: {round(account.counted)} of {account.quota}"
            for policy, account in self._admission.accounts.items()
            if account.steps_left > 0 and not self._admission.has_room(policy)
        ]
        return f"staleness quota full ({', '.join(full)})" if full else ""

    def _issue_to(self, group: TaskGroup, replica: Replica) -> None:
        self._groups[group.id] = group
        self._pool.assign(replica, group.id, group.order.indices, group.order.required_versions)
        group.owners.add(replica.key)
        self._counters["task_groups_issued"] += 1
        record = _record(group, replica.replica_id, replica.incarnation)
        durable = self._send_when_durable(group.id)
        self._journal.submit(records.GROUP, group.id, lambda: records.group_to_json(record), durable)

    def _send_when_durable(self, name: str) -> Callable[[], None]:
        def durable() -> None:
            replica = self._pool.owner(name)
            if replica is not None:
                replica.assignments[name].issued = True
                self._send(replica, name)

        return durable

    def _send(self, replica: Replica, name: str) -> None:
        group = self._groups.get(name)
        if group is not None and group.unresolved:
            order = dataclasses.replace(group.order, indices=group.unresolved)
            self._pool.send(replica, PlayGroup(order))

    def issue_unplayed(self, group: TaskGroup) -> None:
        """Journal a task group that no replica will get."""
        self._groups[group.id] = group
        record = _record(group, replica_id="", incarnation="")
        self._journal.submit(records.GROUP, group.id, lambda: records.group_to_json(record))

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _usable(self, order: TaskGroupOrder, num_slots: int) -> list[Replica]:
        required, policies = order.required_versions, order.policies
        return [r for r in self._pool if r.takes_work and r.fits(num_slots) and self.may_play(r, required, policies)]

    def _born(self, replica: Replica, policies: tuple[str, ...]) -> dict[str, int]:
        """The versions on which rollouts begin there, per policy."""
        return {policy: replica.held[policy].number for policy in self._all(policies)}

    def _lags(self, replica: Replica, policies: tuple[str, ...]) -> dict[str, int]:
        """How many versions it is behind, per policy."""
        return {p: max(0, self._ledgers[p].newest_number - replica.held[p].number) for p in self._all(policies)}

    def may_play(self, replica: Replica, required: Mapping[str, int], policies: tuple[str, ...] = ()) -> bool:
        """Holds known versions of the policies (none named: all) and of their teachers: exactly the required ones, or none too old to be
        trained."""
        for policy in self._served(policies):
            ledger = self._ledgers[policy]
            held = replica.held.get(policy)
            if held is None or not ledger.knows(held.number, held.digest):
                return False
            if policy in required:
                if held.number != required[policy]:
                    return False
            elif not required and ledger.newest_number - held.number > self._max_staleness.get(policy, 0):
                return False
        return True

    def _why_no_replica(self, num_slots: int, policies: tuple[str, ...]) -> str:
        working = [r for r in self._pool if r.takes_work]
        if not any(self.may_play(r, {}, policies) for r in working):
            named = f" of {', '.join(policies)}" if policies else ""
            return f"no replica holds a version{named} that the ledger knows and that is new enough"
        return f"no replica has {num_slots} free slots"

    # --- who is back -------------------------------------------------------------------------------------------------

    def rejoined(self, replica: Replica) -> None:
        """A stream of the replica began: send what is still wanted of it, and what it should hold."""
        self.announcer.sync(replica)
        for name, assignment in replica.assignments.items():
            if assignment.issued:
                self._send(replica, name)
        self.schedule()

    def adopt(self, replica: Replica, task_group_ids: Iterable[str]) -> None:
        """Task groups that a replica was given, says it is playing, and nobody else plays are its own again; those that are
        not wanted any more it may stop."""
        num_cancelled = 0
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is None or group.complete:
                if num_cancelled < MOST_CANCELLED:  # the others end by themselves
                    self._pool.send(replica, CancelGroup(name, "nothing of it is wanted any more"))
                num_cancelled += 1
            elif name in self._orphans and group.was_given_to(replica.key):
                del self._orphans[name]
                group.num_lost = max(0, group.num_lost - 1)  # nobody was lost: only the link to it was, for a while
                self._pool.assign(replica, name, group.unresolved, group.order.required_versions)
                replica.assignments[name].issued = True

    # --- what comes back ---------------------------------------------------------------------------------------------

    def orphaned(self, task_group_ids: Iterable[str]) -> None:
        """Nobody plays these any more; their open slots are issued again."""
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is not None and not group.complete:
                group.num_lost += 1
                self._orphans[name] = None
                log.info("task_group.orphaned", task_group=name, open_slots=len(group.unresolved))
        self.schedule()

    def cancel(self, name: str, reason: str) -> None:
        """Nothing more is wanted of a task group, wherever it is."""
        self._orphans.pop(name, None)
        replica = self._pool.release(name)
        if replica is not None:
            self._pool.send(replica, CancelGroup(name, reason))
            self.announcer.sync(replica)


def _record(group: TaskGroup, replica_id: str, incarnation: str) -> GroupRecord:
    return GroupRecord(
        order=group.order,
        position=group.position,
        evaluation=group.evaluation,
        replica_id=replica_id,
        incarnation=incarnation,
        born=dict(group.born),
    )


def _freest(replicas: Iterable[Replica]) -> Replica | None:
    return max(replicas, key=lambda r: (r.num_free, r.replica_id), default=None)


def _versions(required: Mapping[str, int]) -> str:
    return ", ".join(f"{policy} version {number}" for policy, number in required.items())

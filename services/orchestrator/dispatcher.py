"""Chooses work for replicas: orphaned task groups first, then evaluation, then new training groups within the quota.

    pump():  [orphans] -> [evaluation] -> [training, admission open] -> replica with the most free slots
             -> journal the issue -> durable -> command to the replica

A whole task group goes to the replica with the most free slots, so a slow replica does not block another. The
dispatcher sends an order only after its issue is durable, and gives no work to a replica that lacks the versions of the
ledger. ``pump`` never waits: the core calls ``pump`` after every change, and ``waits_for`` names the missing condition.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog

from services.common.config.recipe import Recipe
from services.common.kept_tokens import REPLICAS_LOST
from services.common.records import TOO_OLD, VERSION_GONE, ClosedReason, RunCount, TaskGroupOrder
from services.common.telemetry.logs import LogEvent
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.evaluation import Evaluations, Evaluators
from services.orchestrator.groups import TaskGroup
from services.orchestrator.ingest import Ingest
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import GroupRecord
from services.orchestrator.journal.journal import Journal
from services.orchestrator.members import CancelGroup, Held, PlayGroup, Replica, ReplicaPool
from services.orchestrator.stalls import Hold
from services.orchestrator.tasks.orders import TrainingOrders
from services.orchestrator.versions import Announcer, VersionLedger

log = structlog.get_logger()
MAX_LOST = 5  # replicas that may be lost under a task group before its open slots are given up
MOST_CANCELLED = 512  # task groups of an earlier process, at once: half of the commands that a stream has room for


class Dispatcher:
    def __init__(
        self,
        recipe: Recipe,
        *,
        pool: ReplicaPool,
        groups: dict[str, TaskGroup],
        experience: ExperiencePipeline,
        ledgers: Mapping[str, VersionLedger],
        training: TrainingOrders,
        evaluations: Evaluations,
        journal: Journal,
        counters: Counter[str],
        ingest: Ingest,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._experience = experience
        self._admission = experience.admission
        self._ledgers = ledgers
        self._max_staleness = {name: policy.batch.max_staleness for name, policy in recipe.trained_policies.items()}
        self._teachers = recipe.teachers
        self._training = training
        self._evaluations = evaluations
        self.evaluators = Evaluators(
            recipe.evaluation, evaluations, pool, self.may_play, lambda policy: ledgers[policy].newest_number
        )
        self._journal = journal
        self._counters = counters
        self._ingest = ingest
        self._cancelled: set[str] = set()  # task groups whose cancellation is on its way to the journal
        self.announcer = Announcer(pool, ledgers, evaluations, self.evaluators, counters, clock)
        self._orphans: dict[str, TaskGroup] = {}  # with open slots and without a replica, in the order of their loss
        self._scheduled = False
        self.train = False  # training groups may be issued
        self.holds: dict[Hold, str] = {}  # reasons that block all issues
        self.waits_for = ""

    @property
    def held_back(self) -> str:
        """The reason that blocks all issues; empty without one."""
        return next(iter(self.holds.values()), "")

    def hold(self, name: Hold, reason: str) -> None:
        """Block all issues while ``reason`` is not empty; several holds may be active."""
        if self.holds.get(name, "") == reason:
            return
        if reason:
            self.holds[name] = reason
        else:
            del self.holds[name]
        log.info("dispatch.hold", hold=name.value, reason=reason or "released")
        self.schedule()

    def schedule(self) -> None:
        """Pump once, soon, for any number of changes."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Issue all task groups that are possible now."""
        self._scheduled = False
        if self.holds:
            self.waits_for = self.held_back
        elif not any(self._pool.workers()):
            self.waits_for = "no replica takes work" if len(self._pool) else "no replica has joined"
        else:
            orphans = self._issue_orphans() if self._orphans else ""
            evaluations = self._issue_evaluations() if self._evaluations.passes else ""
            self.waits_for = self._issue_training() or evaluations or orphans

    def _issue_evaluations(self) -> str:
        for current in self._evaluations.passes.values():
            while current.has_left:
                if wait := self.evaluators.place(current, self.train):
                    return f"evaluation {current.name}: {wait}"
                if not self._evaluations.has_room(current):
                    return f"evaluation {current.name}: evaluation.max_in_flight trajectories are played"
                replica = self.evaluators.freest(current, current.next_samples)
                if replica is None:
                    wanted = ", ".join(f"{policy} version {number}" for policy, number in current.versions.items())
                    return f"evaluation {current.name}: no free replica holds {wanted}"
                self._issue_to(self._evaluations.draw(current), replica)
        return ""

    def _issue_orphans(self) -> str:
        wait = ""
        unmet = set()  # needs for which no replica is free
        for name, group in list(self._orphans.items()):
            if name not in self._groups or group.complete:
                del self._orphans[name]
                continue
            order, num_slots = group.order, len(group.unresolved)
            need = tuple(sorted(order.required_versions.items())), order.policies, num_slots
            if need in unmet:
                continue

            def fits(found: Replica, order: TaskGroupOrder = order) -> bool:
                return self.may_play(found.held, order.required_versions, order.policies)

            replica = self._pool.freest(num_slots, fits)
            if replica is None:
                wait = f"no free replica for task group {name}"
                unmet.add(need)
                continue
            del self._orphans[name]
            self._pool.assign(replica, group)
            self._counters[RunCount.SLOTS_REISSUED.value] += len(group.unresolved)
            born = {policy: replica.held[policy].number for policy in self._all(order.policies)}
            if group.is_training:
                group.born = born
            record = entries.Assignment(
                task_group_id=name, replica_id=replica.replica_id, incarnation=replica.incarnation, born=born
            )
            self._journal.submit(entries.ASSIGNMENT, name, record, self._issue_durable, name)
        return wait

    def _issue_training(self) -> str:
        if not self.train:
            return ""
        reserved = self.evaluators.reserved() if self._evaluations.passes else frozenset()
        wait = ""
        while True:
            # Lowest quota use first, so no policy starves.
            accounts = self._admission.accounts
            fullest = {
                found: max(accounts[p].fullness for p in self._all(found)) for found in self._training.compositions
            }
            for policies in sorted(fullest, key=fullest.__getitem__):
                issued, reason = self._issue_training_group(policies, reserved)
                if issued:
                    break
                wait = reason or wait
            else:
                full = [f"{p}: {round(a.counted)} of {a.quota}" for p, a in accounts.items() if a.is_full]
                return wait or (f"staleness quota full ({', '.join(full)})" if full else "")

    def _issue_training_group(self, policies: tuple[str, ...], reserved: frozenset[str]) -> tuple[bool, str]:
        """Issue one task group of these policies; returns whether that was possible, and the missing condition."""
        trained, size = self._all(policies), self._training.group_size
        if not self._admission.open(trained):
            return False, ""
        newest = {policy: self._ledgers[policy].newest_number for policy in trained}

        def serves(replica: Replica, any_lag: bool = False) -> bool:
            if replica.replica_id in reserved or not self.may_play(replica.held, {}, policies):
                return False
            lags = {policy: max(0, number - replica.held[policy].number) for policy, number in newest.items()}
            return any_lag or self._admission.open(trained, lags)

        replica = self._pool.freest(size, serves)
        if replica is None:
            if self._pool.freest(size, partial(serves, any_lag=True)) is not None:
                return False, "the quota has room only for replicas that hold newer versions"
            if any(self.may_play(replica.held, {}, policies) for replica in self._pool.workers()):
                return False, f"no replica has {size} free slots"
            named = f" of {', '.join(policies)}" if policies else ""
            return False, f"no replica holds a version{named} that the ledger knows and that is new enough"
        group = self._training.next_group(policies, self._experience.next_source(trained))
        group.born = {policy: replica.held[policy].number for policy in trained}
        self._experience.issued(group)
        self._issue_to(group, replica)
        return True, ""

    def may_issue(self, policy: str) -> bool:
        """Whether the quotas have room for another task group with this policy."""
        together = (trained for found in self._training.compositions if policy in (trained := self._all(found)))
        return any(self._admission.open(trained) for trained in together)

    def _all(self, policies: tuple[str, ...]) -> tuple[str, ...]:
        """The trained ones of these policies; without a name, all of the run."""
        return tuple(policy for policy in policies or self._ledgers if policy in self._max_staleness)

    def _issue_to(self, group: TaskGroup, replica: Replica | None) -> None:
        """Journal the issue of a task group, then send its order; without a replica its slots are given up."""
        self._groups[group.id] = group
        replica_id, incarnation = ("", "") if replica is None else replica.key
        record = GroupRecord(
            order=group.order, position=group.position, evaluation=group.evaluation,
            replica_id=replica_id, incarnation=incarnation, born=dict(group.born),
        )  # fmt: skip
        if replica is None:
            self._journal.submit(entries.GROUP, group.id, record)
            return
        self._pool.assign(replica, group)
        self._counters[RunCount.TASK_GROUPS_ISSUED.value] += 1
        self._journal.submit(entries.GROUP, group.id, record, self._issue_durable, group.id)

    def _issue_durable(self, name: str) -> None:
        """Send the order of a task group to its replica; the journal calls this after the write of the issue."""
        replica = self._pool.owner(name)
        if replica is not None:
            replica.assignments[name].issued = True
            self._send(replica, name)

    def _send(self, replica: Replica, name: str) -> None:
        group = self._groups.get(name)
        if group is not None and group.unresolved:
            order = dataclasses.replace(group.order, indices=group.unresolved)
            self._pool.send(replica, PlayGroup(order))

    # --- choosing ----------------------------------------------------------------------------------------------------

    def may_play(self, holds: Mapping[str, Held], required: Mapping[str, int], policies: tuple[str, ...] = ()) -> bool:
        """Whether these are known versions of the policies (without a name: all) and of their teachers: exactly the
        required ones, or else recent enough to be trained."""
        taught_by = tuple(self._teachers[policy] for policy in policies if policy in self._teachers)
        for policy in policies + taught_by or self._ledgers:
            ledger = self._ledgers[policy]
            held = holds.get(policy)
            known = None if held is None else ledger.versions.get(held.number)
            if held is None or known is None or known.digest != held.digest:
                return False
            if policy in required:
                if held.number != required[policy]:
                    return False
            elif not required and ledger.newest_number - held.number > self._max_staleness.get(policy, 0):
                return False
        return True

    # --- replicas that return ----------------------------------------------------------------------------------------

    def rejoined(self, replica: Replica) -> None:
        """Handle a new stream of a replica: send the wanted orders and the announced versions."""
        self.announcer.sync(replica)
        for name, assignment in replica.assignments.items():
            if assignment.issued:
                self._send(replica, name)
        self.schedule()

    def adopt(self, replica: Replica, task_group_ids: Iterable[str]) -> None:
        """Assign task groups to a replica again that were given to the replica, that the replica reports and that no
        other replica runs; cancel those that are not wanted."""
        num_cancelled = 0
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is None or group.complete:
                if num_cancelled < MOST_CANCELLED:  # the others end by themselves
                    self._pool.send(replica, CancelGroup(name, "the run no longer needs the task group"))
                num_cancelled += 1
            elif name in self._orphans and (group.lacks_owner or replica.key in group.owners):
                del self._orphans[name]
                group.num_lost = max(0, group.num_lost - 1)  # only the connection was lost, not the replica
                self._pool.assign(replica, group)
                replica.assignments[name].issued = True

    # --- results -----------------------------------------------------------------------------------------------------

    def orphaned(self, task_group_ids: Iterable[str]) -> None:
        """Queue task groups without a replica: their open slots are issued again, or fail after too many lost replicas."""
        for name in task_group_ids:
            group = self._groups.get(name)
            if group is None or group.complete:
                continue
            group.num_lost += 1
            self._orphans.setdefault(name, group)
            log.info(LogEvent.TASK_GROUP_ORPHANED, task_group=name, open_slots=len(group.unresolved))
            if group.num_lost > MAX_LOST:
                self.give_up(group, REPLICAS_LOST, f"{group.num_lost} replicas were lost while they ran the task group")
        self.schedule()

    def take_back(self, task_group_id: str, reason: str) -> None:
        """Cancel a task group on its replica, then issue its open slots again as ``orphaned`` does."""
        self.cancel(task_group_id, reason)
        self.orphaned([task_group_id])

    def give_up(self, group: TaskGroup, reason: str, detail: str) -> None:
        """Fail the open slots of a task group."""
        log.warning(LogEvent.TASK_GROUP_GIVEN_UP, task_group=group.id, reason=reason, open_slots=len(group.unresolved))
        for index in group.unresolved:
            self._ingest.fail(group, index, reason, detail)

    def cancel_too_old(self, groups: list[TaskGroup]) -> None:
        """Cancel training groups whose results could only be dropped, and fail their open slots; repetition has no
        effect."""
        self._cancelled = {name for name in self._cancelled if name in self._groups}
        for group in groups:
            if group.id in self._cancelled:
                continue
            self._cancelled.add(group.id)
            log.info("task_group.too_old", task_group=group.id, open_slots=len(group.unresolved))
            self.cancel(group.id, "its open slots are too old to be trained")
            for index in group.unresolved:
                self._ingest.fail(group, index, TOO_OLD, "a rollout that began then could only have been dropped")

    def abandon_evaluations(self, gone: Callable[[Mapping[str, int]], bool]) -> None:
        """Fail the open slots of evaluations on versions that no replica holds any more."""
        running = [g for g in self._groups.values() if g.evaluation and gone(g.order.required_versions)]
        unissued = self._evaluations.unissued(gone)
        for group in unissued:
            self._issue_to(group, None)
        for group in [*running, *unissued]:
            self.cancel(group.id, ClosedReason.VERSION_GONE)
            self.give_up(group, VERSION_GONE, ClosedReason.VERSION_GONE)

    def resolved(self, group: TaskGroup) -> None:
        """Handle the outcome of a slot, from any replica."""
        if group.complete:
            self._orphans.pop(group.id, None)
        self.schedule()

    def cancel(self, name: str, reason: str) -> None:
        """Cancel a task group on its replica or in the queue."""
        self._orphans.pop(name, None)
        replica = self._pool.release(name)
        if replica is not None:
            self._pool.send(replica, CancelGroup(name, reason))
            self.announcer.sync(replica)

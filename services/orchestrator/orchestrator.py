"""Owns the orchestrator's parts and connects their events.

    replica --record--> Ingest --durable--> ExperiencePipeline / Evaluations --> Batches --> trainer
       ^                                                                               |
       '------------------ Dispatcher <----- VersionLedger <---------version-----------'

No part imports the core: the core makes each part with its inputs, and handles what the parts report. Servicers, recovery,
lifecycle, progress and periodic checks take the core. Independent of grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common import records as fates
from services.common.config.processes import Placement, Tracker
from services.common.config.recipe import Recipe
from services.common.errors import StateError
from services.common.records import WeightVersion
from services.common.telemetry.accounts import ORCHESTRATOR, Component, TimeAccount, trainer_component
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import StepKey, trainer_key
from services.orchestrator.buffer.batches import Batches, ExperiencePipeline
from services.orchestrator.buffer.buffer import RewardRules
from services.orchestrator.dispatcher import Dispatcher
from services.orchestrator.evaluation import EvaluationPass, Evaluations, Threshold
from services.orchestrator.groups import Outcome, RunControl, TaskGroup
from services.orchestrator.ingest import Ingest, MaskedSamples, RecordBounds
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import EvaluationResult, GroupVerdict, Verdicts
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import Quarantine
from services.orchestrator.members import ReplicaPool, StopTraining, TrainerLeases, TrainerRequest
from services.orchestrator.metrics import DiskForecast, RunMetrics, Timeline
from services.orchestrator.stalls import PAUSED_ITSELF, AccountBook, Hold, Stall
from services.orchestrator.tasks.orders import GroupNames, TrainingOrders
from services.orchestrator.tasks.rows import UsableRows
from services.orchestrator.turns import DeviceTurns
from services.orchestrator.versions import VersionLedger

log = structlog.get_logger()


class OrchestratorCore:
    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        *,
        training_sources: Mapping[str, UsableRows],
        evaluation_sources: Mapping[str, UsableRows],
        run_mark: str,
        started_at: float,
        aside: Quarantine | None = None,
        clock: Callable[[], float] = time.monotonic,
        vocab_sizes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        """``training_sources``: by name, the only one without a name. ``aside``: records of the journal that are not used.
        ``vocab_sizes``: rows of each policy's embedding, as far as they are known before its trainer joins."""
        assert recipe.run.id is not None
        self.recipe = recipe
        self.run_id: str = recipe.run.id
        self.run_dir = run_dir
        self.num_steps = recipe.run.steps
        self.started_at = started_at
        self.journal = journal
        self.clock = clock
        self.aside = Quarantine() if aside is None else aside
        self.counters: Counter[str] = Counter()
        self.groups: dict[str, TaskGroup] = {}
        self.names = GroupNames(run_mark)
        self.timeline = Timeline()
        self.account = TimeAccount(ORCHESTRATOR, clock=clock)
        self.book = AccountBook()
        self.stalls: tuple[Stall, ...] = ()  # that block the run
        self.lost: dict[Component, float] = {}  # components with a lost lease until they return: time of the loss
        self.metrics = RunMetrics(run_dir, tensorboard=Tracker.TENSORBOARD in recipe.run.trackers)
        kept = sum(policy.trainer.keep_checkpoints for policy in recipe.trained_policies.values())
        self.disk = DiskForecast(recipe.orchestrator.min_free_bytes, kept)
        self.control = RunControl(self._control_changed)
        self.judged_before: set[str] = set()  # task groups with journaled verdicts of an earlier process
        self._changed = asyncio.Event()
        self.ledgers = {policy: VersionLedger(policy) for policy in recipe.policies}
        self.pool = ReplicaPool(recipe.orchestrator.lease_s, clock)
        self.trainers = TrainerLeases(recipe.trained_policies, recipe.orchestrator.lease_s, clock)
        self.turns = DeviceTurns(recipe, self.pool, self.trainers, self._wake_ranks, clock)
        configs = {name: policy.batch for name, policy in recipe.trained_policies.items()}
        self.rewards = RewardRules.of(recipe)
        self.experience = ExperiencePipeline(
            configs,
            self.num_steps,
            self.counters,
            admit=recipe.rollout.admit,
            deterministic=recipe.run.deterministic,
            on_closed=self.close_group,
            on_judged=self._judged,
            rules=self.rewards,
            seed=recipe.run.seed,
            sources=recipe.data.sources,
        )
        shared = recipe.placement is Placement.SHARED
        self.batches = {
            name: Batches(
                name,
                config,
                self.experience,
                self.journal,
                clock=clock,
                may_compute=partial(self.turns.may_compute, name) if shared else None,
            )
            for name, config in configs.items()
        }
        self.training_orders = TrainingOrders(recipe, training_sources, self.names)
        self.evaluations = Evaluations(
            recipe, evaluation_sources, self.names, self.rewards, self._evaluated, started_at
        )
        self.threshold = Threshold.of(recipe, self.evaluations.results)
        self.trained_ledgers = {policy: self.ledgers[policy] for policy in self.batches}
        self.last_metrics: dict[str, dict[str, float]] = {policy: {} for policy in self.ledgers}  # of the newest steps
        self.bounds = RecordBounds.of(recipe, vocab_sizes)
        self.ingest = Ingest(
            self.groups,
            self.names.was_issued,
            self.ledgers,
            self.journal,
            self.counters,
            self._resolved,
            bounds=self.bounds,
            is_member=self.pool.has_met,
            clock=clock,
        )
        self.masked = MaskedSamples(self.counters, recipe.rollout.max_masked_share)
        self.dispatcher = Dispatcher(
            recipe,
            pool=self.pool,
            groups=self.groups,
            experience=self.experience,
            ledgers=self.ledgers,
            training=self.training_orders,
            evaluations=self.evaluations,
            journal=self.journal,
            counters=self.counters,
            ingest=self.ingest,
            clock=clock,
        )
        self.pool.on_orphaned = self.dispatcher.orphaned
        self.experience.issuable = self.dispatcher.may_issue
        for batches in self.batches.values():
            batches.may_begin = self.may_begin
            batches.late.cancel = self.dispatcher.cancel_too_old

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on versions, evaluations or run control.

        Has no deadline: a run has no maximum duration, and its progress names the components that the run waits for.
        """
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- records -----------------------------------------------------------------------------------------------------

    def _resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """Handle the durable first record of a slot."""
        replica = self.pool.resolved(group.id, outcome.index)
        if group.is_training:
            self.masked.resolved(self.experience.policies_of(group), outcome)
        if group.is_training and group.complete:
            self.observe(group)  # before the step that closes the task group: a recovery does not parse closed ones
        self.apply_resolved(group, outcome)
        if replica is not None and group.order.required_versions and group.complete:
            self.dispatcher.announcer.sync(replica)  # the replica may now take newer weights
        self._wake_ranks()
        self.dispatcher.resolved(group)

    def observe(self, group: TaskGroup) -> None:
        """Pass the rewards of a prompt to the curation, and journal them for a restart."""
        orders, source = self.training_orders, group.order.source
        if not orders.observes:
            return
        row, rewards = orders.row_of(group), self.rewards.outcome_rewards(group.outcomes.values())
        orders.observe(source, row, rewards)
        observed = entries.Observation(task_group_id=group.id, source=source, row=row, rewards=tuple(rewards))
        self.journal.submit(entries.OBSERVATION, group.id, observed)

    def apply_resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """Apply a resolved slot, live or during recovery. The last slot of a training group brings verdicts."""
        if group.complete:
            self.groups.pop(group.id, None)
        if group.is_training:
            self.experience.resolved(group, outcome)
        else:
            self.evaluations.resolved(group, outcome)

    def _wake_ranks(self) -> None:
        """Let the calls that wait for a batch look again."""
        for batches in self.batches.values():
            batches.notify()

    def _judged(self, task_group_id: str, verdicts: list[GroupVerdict]) -> None:
        """Journal verdicts before their consequences, so that no closed task group lacks its verdicts after a crash."""
        if task_group_id not in self.judged_before:
            found = Verdicts(task_group_id=task_group_id, advantage_groups=tuple(verdicts))
            self.journal.submit(entries.VERDICT, task_group_id, found)

    def last_batch_taken(self) -> None:
        """Handle the last batch of a policy, which its trainer received: the policy's running task groups have no use."""
        done = {name for name, batches in self.batches.items() if batches.newest_step >= self.num_steps}
        self.cancel_training_groups(fates.ClosedReason.STEPS_DONE, done)
        self.dispatcher.schedule()

    def cancel_training_groups(self, reason: fates.ClosedReason, policies: set[str] | None = None) -> None:
        """Cancel running training groups at the end of training, or those whose policies are all in ``policies``."""
        over = set(self.batches) if policies is None else policies
        for group in [
            g for g in self.groups.values() if g.is_training and over.issuperset(self.experience.policies_of(g))
        ]:
            self.experience.cancelled(group)
            self._cancel(group, reason)

    def _cancel(self, group: TaskGroup, reason: fates.ClosedReason) -> None:
        del self.groups[group.id]
        self.counters[fates.RunCount.TASK_GROUPS_CANCELLED.value] += 1
        self.dispatcher.cancel(group.id, reason)
        self.close_group(group.id, reason)

    def close_group(self, task_group_id: str, reason: fates.ClosedReason) -> None:
        """Journal the end of a task group."""
        self.journal.submit(entries.CLOSED, task_group_id, entries.Closed(task_group_id=task_group_id, reason=reason))

    def skip_evaluations(self) -> None:
        """After training: skip evaluations of steps that would play the versions of the last evaluation, which comes next."""
        self._forget_evaluations(self.dispatcher.evaluators.repeats_the_end, fates.ClosedReason.STEPS_DONE)

    def abandon_evaluations(self, gone: Callable[[Mapping[str, int]], bool]) -> None:
        """End evaluations on versions that no replica holds any more. Those of training steps are forgotten, so that the
        step reached is evaluated; requested ones get their result, in which open slots are failures."""
        lost = {p.evaluation_id for p in self.evaluations.passes.values() if p.pinned and gone(p.versions)}
        self._forget_evaluations(lambda p: p.evaluation_id in lost, fates.ClosedReason.VERSION_GONE)
        self.dispatcher.abandon_evaluations(gone)

    def _forget_evaluations(self, which: Callable[[EvaluationPass], bool], reason: fates.ClosedReason) -> None:
        """Forget unfinished passes of training steps, and cancel their task groups."""
        for skipped in self.evaluations.skip(which):
            log.info("evaluation.skipped", evaluation=skipped.name, resolved=skipped.num_resolved, reason=reason)
            for name in skipped.group_ids & self.groups.keys():
                self._cancel(self.groups[name], reason)
        self._changed.set()  # another evaluation may be due
        self.dispatcher.schedule()

    def live_groups(self) -> set[str]:
        """Task groups whose records a batch, a running slot or an evaluation still needs."""
        return set(self.groups) | self.experience.buffered_groups() | self.evaluations.group_ids()

    # --- versions ----------------------------------------------------------------------------------------------------

    def apply_version(self, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        """Apply a durable version, live or during recovery."""
        policy = version.policy
        if self.ledgers[policy].record(version) and policy in self.batches:
            self._advanced(policy, version.number)
            self.last_metrics[policy] = dict(metrics)

    def lose_version(self, policy: str, number: int) -> None:
        """Handle a published version with a lost record: advance the staleness; the trainer offers the version again."""
        self.ledgers[policy].lose(number)
        if policy in self.batches:
            self._advanced(policy, number)

    def _advanced(self, policy: str, number: int) -> None:
        if number <= self.batches[policy].newest_version:  # a lost one that was offered again
            return
        self.experience.advanced(policy, number)
        self.batches[policy].published(number)
        if policy == next(iter(self.batches)) and self.training_orders.observes:  # a step of the run
            self.training_orders.advanced()

    def adopt_version(self, version: WeightVersion) -> None:
        """Record version 0 of a policy without a trainer as the newest."""
        self.journal.submit(entries.VERSION, f"{version.policy}/0", entries.VersionRecord(version=version))
        self.apply_version(version, {})
        self._changed.set()

    def announce_version(self, policy: str, is_new: bool) -> None:
        """Announce a policy's newest version to the replicas, or (not ``is_new``) its changed sources."""
        if is_new:
            self.dispatcher.announcer.plan_fetches(policy)
        self.dispatcher.announcer.sync_all(again=not is_new)
        self._wake_ranks()
        self.dispatcher.schedule()
        self._changed.set()

    def write_step(
        self, version: WeightVersion, metrics: Mapping[str, float], compute: Iterable[tuple[float, float]]
    ) -> None:
        """Write the row of the training step that brought this version: statistics of its batch, metrics of its trainer,
        gauges of the curation. ``compute``: when the trainer computed."""
        policy, step, intervals = version.policy, version.number, list(compute)
        self.timeline.computed(policy, intervals)
        values = {
            **self.batches[policy].statistics.pop(step, {}),
            **{trainer_key(name): value for name, value in metrics.items()},
            **self.training_orders.gauges(),
            StepKey.COMPUTE_S.value: sum(end - begin for begin, end in intervals),
            StepKey.ELAPSED_S.value: time.time() - self.started_at,
        }
        self.last_metrics[policy] = values
        self.metrics.training_step(policy, step, values)
        self.write_state()

    def may_begin(self, training_step: int) -> bool:
        """Whether the recipe lets any policy begin this step by now."""
        if self.reached_threshold:
            return False
        behind = training_step - 1
        trained = self.trained_ledgers.values()
        return not self.recipe.run.lockstep or all(ledger.newest_number >= behind for ledger in trained)

    @property
    def reached_threshold(self) -> bool:
        """Whether training ends before its last step because ``run.until`` holds: no further batch begins."""
        return self.threshold is not None and self.threshold.reached

    def last_step(self, policy: str) -> int:
        """The last training step of a policy, as far as known."""
        return self.batches[policy].newest_step if self.reached_threshold else self.num_steps

    @property
    def all_trained(self) -> bool:
        """Whether every policy has taken its last step, with its version published."""
        if self.reached_threshold:
            return all(batches.settled for batches in self.batches.values())
        return all(ledger.newest_number >= self.num_steps for ledger in self.trained_ledgers.values())

    @property
    def ended_early(self) -> bool:
        """Whether training is over before its last step: a trainer does not know that its newest step is the last."""
        return self.reached_threshold and self.all_trained

    # --- leases ------------------------------------------------------------------------------------------------------

    def check_leases(self) -> None:
        """Give away the work of silent replicas, and end the leases that ran out. The other policies continue after the
        loss of a trainer."""
        for replica in self.pool.give_away():
            log.warning("replica.work_given_away", replica=replica.replica_id, incarnation=replica.incarnation)
        for replica in self.pool.expire():
            log.warning(LogEvent.LEASE_LOST, replica=replica.replica_id, incarnation=replica.incarnation)
            self.counters[fates.RunCount.REPLICA_LEASES_LOST.value] += 1
            self.lost[replica.component] = self.clock()
            self.dispatcher.schedule()
        for trainer in self.trainers.expire():
            log.warning("trainer.lease_lost", policy=trainer.policy, incarnation=trainer.incarnation)
            self.counters[fates.RunCount.TRAINER_LEASES_LOST.value] += 1
            self.lost[trainer_component(trainer.policy)] = self.clock()
            self.experience.admission.absent.add(trainer.policy)
            self.dispatcher.schedule()
        self.turns.settle()

    def trainer_found(self, policy: str) -> None:
        """Forget the absence of a policy's trainer."""
        self.lost.pop(trainer_component(policy), None)
        self.experience.admission.absent.discard(policy)

    # --- phases ------------------------------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Issue training groups, unless the threshold is reached."""
        self.dispatcher.train = not self.reached_threshold
        self.dispatcher.schedule()

    def save_checkpoints(self) -> None:
        self.trainers.send_all(TrainerRequest.SAVE_CHECKPOINT)
        self.turns.trainers_need_it()

    def dismiss(self, reason: str) -> None:
        """Tell trainers and replicas to leave after the end of the run."""
        self.trainers.send_all(StopTraining(reason))
        self.turns.trainers_need_it()
        self.pool.drain_all(reason)

    # --- evaluations and run control ---------------------------------------------------------------------------------

    async def begin_evaluation(self, evaluation_id: str) -> None:
        """Queue an evaluation of the newest versions, unless known already."""
        if self.evaluations.known(evaluation_id):
            return
        if not self.evaluations.rows:
            raise StateError("this recipe has no data.evaluation, so there are no tasks to evaluate on")
        if any(ledger.newest is None for ledger in self.ledgers.values()):
            raise StateError("no weight version is published yet that could be evaluated")
        versions = {policy: ledger.newest_number for policy, ledger in self.ledgers.items()}
        started = entries.EvaluationStart(evaluation_id=evaluation_id, versions=versions)
        await self.journal.append(entries.EVALUATION_START, evaluation_id, started)
        self.evaluations.begin(evaluation_id, versions)
        log.info("evaluation.started", evaluation=evaluation_id, versions=versions)
        self.dispatcher.schedule()

    def _evaluated(self, result: EvaluationResult) -> None:
        log.info(
            "evaluation.finished", evaluation=result.name, mean_reward=result.mean_reward, failed=result.num_failed
        )
        self.journal.submit(entries.EVALUATION, result.name, result)
        self.metrics.evaluation(result)
        self._changed.set()

    def _control_changed(self) -> None:
        control = self.control
        log.info("run.state", state=control.state.value)
        self.apply_control()
        self.write_state()
        self._changed.set()
        self.dispatcher.schedule()

    def apply_control(self) -> None:
        """Apply pause and end to batches and dispatcher; also during recovery."""
        control = self.control
        for batches in self.batches.values():
            batches.paused = control.paused or control.ended
            batches.notify()
        self.dispatcher.hold(Hold.ENDED, f"the run has {control.phase.value}" if control.ended else "")
        self.dispatcher.hold(Hold.PAUSED, "the run is paused: `rollmill resume` goes on" if control.paused else "")

    def pause(self) -> None:
        if self.control.pause():
            self.trainers.send_all(TrainerRequest.PAUSE)

    def resume(self) -> None:
        if self.control.resume():
            self.trainers.send_all(TrainerRequest.RESUME)

    def write_state(self) -> None:
        """Journal values that no other record holds."""
        state = entries.StateRecord(
            phase=self.control.phase,
            # Another process has other code or settings, and tries again after a pause of the run's own.
            paused=self.control.paused and PAUSED_ITSELF.isdisjoint(self.dispatcher.holds),
            counters=dict(self.counters),
            timeline=self.timeline.totals(),
        )
        self.journal.submit(entries.STATE, "", state)

    @property
    def all_left(self) -> bool:
        """Whether no replica and no trainer has a stream."""
        return all(replica.mailbox is None for replica in self.pool) and all(
            trainer.mailbox is None for trainer in self.trainers
        )

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for batches in self.batches.values():
            batches.close()
        self.pool.close()
        self.trainers.close()

    def withdraw(self) -> None:
        """Drop the submitted records and close the files of metrics; only before the start of the journal."""
        self.metrics.close()
        self.journal.withdraw()

"""Owns the orchestrator's parts and connects their events.

    replica --record--> Ingest --durable--> ExperiencePipeline / Evaluations --> Batches --> trainer
       ^                                                                               |
       '------------------ Dispatcher <----- VersionLedger <---------version-----------'

No part imports the core: the core passes each part its inputs and handles its callbacks. Progress and periodic checks read
its parts; ``wiring`` gives servicers, recovery and lifecycle those that they need. Independent of grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common import records as fates
from services.common.config.processes import Placement, Tracker
from services.common.config.recipe import Recipe
from services.common.errors import StateError
from services.orchestrator.buffer.batches import Batches, ExperiencePipeline
from services.orchestrator.buffer.buffer import RewardRules
from services.orchestrator.dispatcher import Dispatcher, RetryLimit
from services.orchestrator.evaluation import EvaluationPass, Evaluations, Threshold
from services.orchestrator.groups import Outcome, RunControl, TaskGroup
from services.orchestrator.ingest import Ingest, MaskedSamples, RecordBounds, Refusals
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import EvaluationResult, GroupVerdict
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import Quarantine
from services.orchestrator.members import PauseTraining, ReplicaPool, ResumeTraining, SaveCheckpoint, StopTraining
from services.orchestrator.metrics import DiskForecast, RunMetrics, Timeline
from services.orchestrator.policy_view import PolicyView
from services.orchestrator.stalls import PAUSED_ITSELF, Hold, StallState
from services.orchestrator.tasks.datasets import TaskSource
from services.orchestrator.tasks.orders import GroupNames, TrainingOrders
from services.orchestrator.trainers import Absences, DeviceTurns, TrainerLeases
from services.orchestrator.versions import MAX_RELAYS, FanOut, PublishedVersions, VersionLedger

log = structlog.get_logger()


class OrchestratorCore:
    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        *,
        training_sources: Mapping[str, TaskSource],
        evaluation_sources: Mapping[str, TaskSource],
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
        self.stall_state = StallState(clock)
        self.metrics = RunMetrics(run_dir, tensorboard=Tracker.TENSORBOARD in recipe.run.trackers)
        kept = sum(policy.trainer.keep_checkpoints for policy in recipe.trained_policies.values())
        self.disk = DiskForecast(recipe.orchestrator.min_free_bytes, kept)
        self.control = RunControl(self._control_changed)
        self.judged_before: set[str] = set()  # task groups with journaled verdicts of an earlier process
        self._changed = asyncio.Event()
        self.ledgers = {policy: VersionLedger(policy) for policy in recipe.policies}
        self.pool = ReplicaPool(
            recipe.orchestrator.lease_s, clock, on_orphaned=lambda names: self.retry_limit.orphaned(names)
        )
        self.trainers = TrainerLeases(recipe.trained_policies, recipe.orchestrator.lease_s, clock)
        self.turns = DeviceTurns(
            shared=recipe.placement is Placement.SHARED,
            policies=recipe.trained_policies if recipe.run.steps else {},
            num_services=len(recipe.inference),
            pool=self.pool,
            trainers=self.trainers,
            on_granted=self._wake_ranks,
            clock=clock,
        )
        self._make_experience(vocab_sizes)
        self.training_orders = TrainingOrders.of(recipe, training_sources, self.names)
        self.evaluations = Evaluations.of(
            recipe, evaluation_sources, self.names, self.rewards, self._evaluated, started_at
        )
        self.threshold = Threshold.of(recipe, self.evaluations.results)
        self.dispatcher = self._make_dispatcher()
        self._make_ingest()
        self._make_versions()

    def _make_experience(self, vocab_sizes: Mapping[str, int | None]) -> None:
        recipe = self.recipe
        self._batch_configs = {name: policy.batch for name, policy in recipe.trained_policies.items()}
        self.rewards = RewardRules.of(recipe)
        self.experience = ExperiencePipeline(
            self._batch_configs,
            self.num_steps,
            self.counters,
            admit=recipe.rollout.admit,
            deterministic=recipe.run.deterministic,
            issuable=lambda policy: self.dispatcher.may_issue(policy),
            on_closed=partial(entries.close_group, self.journal),
            on_judged=self._judged,
            rules=self.rewards,
            seed=recipe.run.seed,
            sources=recipe.data.sources,
        )
        self.bounds = RecordBounds.of(recipe, vocab_sizes)
        shared = recipe.placement is Placement.SHARED
        limited = recipe.run.lockstep or recipe.run.until is not None
        self.batches = {
            name: Batches(
                name,
                config,
                self.experience,
                self.journal,
                cancel=lambda groups: self.retry_limit.cancel_too_old(groups),
                clock=self.clock,
                may_begin=(lambda step: self.versions.may_begin(step)) if limited else None,
                may_compute=partial(self.turns.may_compute, name) if shared else None,
            )
            for name, config in self._batch_configs.items()
        }
        self.policies = {
            name: PolicyView(
                name=name,
                config=config,
                ledger=self.ledgers[name],
                batches=self.batches[name],
                experience=self.experience,
                trainers=self.trainers,
            )
            for name, config in self._batch_configs.items()
        }

    def _make_dispatcher(self) -> Dispatcher:
        recipe = self.recipe
        return Dispatcher(
            pool=self.pool,
            groups=self.groups,
            experience=self.experience,
            ledgers=self.ledgers,
            max_staleness={name: config.max_staleness for name, config in self._batch_configs.items()},
            teachers=recipe.teachers,
            training=self.training_orders,
            evaluations=self.evaluations,
            evaluation=recipe.evaluation,
            journal=self.journal,
            counters=self.counters,
            fanout=FanOut(dict.fromkeys(recipe.policies, MAX_RELAYS)),
            clock=self.clock,
        )

    def _make_ingest(self) -> None:
        rollout = self.recipe.rollout
        self.ingest = Ingest(
            self.groups,
            self.names.was_issued,
            self.ledgers,
            self.journal,
            self.counters,
            self._resolved,
            bounds=self.bounds,
            refusals=Refusals(self.counters, self.clock),
            is_member=lambda sender: self.pool.has_met(*sender),
        )
        self.retry_limit = RetryLimit(self.groups, self.dispatcher, self.evaluations, self.ingest)
        self.masked = MaskedSamples(self.counters, rollout.max_masked_share)

    def _make_versions(self) -> None:
        self.versions = PublishedVersions(
            ledgers=self.ledgers,
            batches=self.batches,
            experience=self.experience,
            curation=self.training_orders,
            threshold=self.threshold,
            announcer=self.dispatcher.announcer,
            schedule=self.dispatcher.schedule,
            journal=self.journal,
            num_steps=self.num_steps,
            lockstep=self.recipe.run.lockstep,
            on_change=self._changed.set,
        )
        self.absences = Absences(
            self.pool,
            self.trainers,
            lost=self.stall_state.lost,
            untrained=self.experience.admission.absent,
            counters=self.counters,
            clock=self.clock,
            on_lost=self.dispatcher.schedule,
            on_checked=self.turns.settle,
        )

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
        record = {"task_group_id": group.id, "source": source, "row": row, "rewards": rewards}
        self.journal.submit(entries.OBSERVATION, group.id, lambda: record)

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
            encode = partial(entries.verdicts_to_json, task_group_id, verdicts)
            self.journal.submit(entries.VERDICT, task_group_id, encode)

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
        entries.close_group(self.journal, group.id, reason)

    def skip_evaluations(self) -> None:
        """After training: skip evaluations of steps that would play the versions of the last evaluation, which comes next."""
        self._forget_evaluations(self.dispatcher.evaluators.repeats_the_end, fates.ClosedReason.STEPS_DONE)

    def abandon_evaluations(self, gone: Callable[[Mapping[str, int]], bool]) -> None:
        """End evaluations on versions that no replica holds any more. Those of training steps are forgotten, so that the
        step reached is evaluated; requested ones get their result, in which open slots are failures."""
        lost = {p.evaluation_id for p in self.evaluations if p.pinned and gone(p.versions)}
        self._forget_evaluations(lambda p: p.evaluation_id in lost, fates.ClosedReason.VERSION_GONE)
        self.retry_limit.abandon_evaluations(gone)

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

    # --- phases ------------------------------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """Issue training groups, unless the threshold is reached."""
        self.dispatcher.train = not self.versions.reached_threshold
        self.dispatcher.schedule()

    def stop_issuing(self) -> None:
        """Issue no more training groups."""
        self.dispatcher.train = False

    def end_training(self, reason: fates.ClosedReason) -> None:
        """Issue no more training groups, and cancel the running ones."""
        self.stop_issuing()
        self.cancel_training_groups(reason)

    def save_checkpoints(self) -> None:
        self.trainers.send_all(SaveCheckpoint())
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
        if not self.evaluations.possible:
            raise StateError("this recipe has no data.evaluation, so there are no tasks to evaluate on")
        if any(ledger.newest is None for ledger in self.ledgers.values()):
            raise StateError("no weight version is published yet that could be evaluated")
        versions = {policy: ledger.newest_number for policy, ledger in self.ledgers.items()}
        started = {
            "evaluation_id": evaluation_id,
            "versions": [{"policy": policy, "number": number} for policy, number in versions.items()],
        }
        await self.journal.append(entries.EVALUATION_START, evaluation_id, lambda: started)
        self.evaluations.begin(evaluation_id, versions)
        log.info("evaluation.started", evaluation=evaluation_id, versions=versions)
        self.dispatcher.schedule()

    def _evaluated(self, result: EvaluationResult) -> None:
        log.info(
            "evaluation.finished", evaluation=result.name, mean_reward=result.mean_reward, failed=result.num_failed
        )
        self.journal.submit(entries.EVALUATION, result.name, lambda: entries.evaluation_to_json(result))
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
            self.trainers.send_all(PauseTraining())

    def resume(self) -> None:
        if self.control.resume():
            self.trainers.send_all(ResumeTraining())

    def write_state(self) -> None:
        """Journal values that no other record holds."""
        state = {
            "phase": self.control.phase.value,
            # Another process has other code or settings, and tries again after a pause of the run's own.
            "paused": self.control.paused and PAUSED_ITSELF.isdisjoint(self.dispatcher.holds),
            "counters": entries.pairs(self.counters),
            "timeline": entries.pairs(self.timeline.totals()),
        }
        self.journal.submit(entries.STATE, "", lambda: state)

    @property
    def has_work(self) -> bool:
        """Whether a replica runs a slot."""
        return bool(self.pool.num_running)

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

    def close_metrics(self) -> None:
        """Close the files of metrics; the last call."""
        self.metrics.close()

    def withdraw(self) -> None:
        """Drop the submitted records and close the files of metrics; only before the start of the journal."""
        self.metrics.close()
        self.journal.withdraw()

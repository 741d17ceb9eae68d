"""The orchestrator's parts put together: what each event means for all of them.

    replica --record--> Ingest --durable--> Experience / Evaluations --> Batches --> trainer
       ^                                                                               |
       '------------------ Dispatcher <----- VersionLedger <---------version-----------'

The parts do not know the ring; it passes them what they need and reacts to what they report. What peers ask of it is in
``replica_side`` and ``trainer_side``. Knows nothing about grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import structlog

from services.common import fates
from services.common.config.data import TRAIN
from services.common.config.recipe import Recipe
from services.common.errors import StateError
from services.common.types import WeightVersion
from services.orchestrator.batches import Batches
from services.orchestrator.bounds import RecordBounds
from services.orchestrator.commands import PauseTraining, ResumeTraining
from services.orchestrator.curation import AcceptAll, build_curation
from services.orchestrator.curriculum import Curriculum
from services.orchestrator.datasets import TaskSource
from services.orchestrator.dispatcher import Dispatcher
from services.orchestrator.evaluation import Evaluations
from services.orchestrator.experience import Experience
from services.orchestrator.fanout import FanOut
from services.orchestrator.forecast import DiskOutlook
from services.orchestrator.giving_up import GivingUp
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.ingest import Ingest
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import EvaluationResult, Verdict
from services.orchestrator.journal.writer import Journal
from services.orchestrator.masked import MaskedSamples
from services.orchestrator.metrics import RunMetrics
from services.orchestrator.orders import GroupNames, TrainingOrders, sampling_of
from services.orchestrator.pool import Replica, ReplicaPool
from services.orchestrator.quarantine import Quarantine
from services.orchestrator.refusals import Refusals
from services.orchestrator.rewards import RewardRules
from services.orchestrator.run_control import RunControl
from services.orchestrator.stalls.standing import Standing
from services.orchestrator.timeline import Timeline
from services.orchestrator.trainers import TrainerLeases
from services.orchestrator.versions import VersionLedger

log = structlog.get_logger()


class Ring:
    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        *,
        training_source: TaskSource,
        evaluation_sources: Mapping[str, TaskSource],
        run_mark: str,
        started_at: float,
        clock: Callable[[], float] = time.monotonic,
        vocab_sizes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        """``vocab_sizes``: rows of each policy's embedding, as far as they are known before its trainer joins."""
        assert recipe.run.id is not None
        self.recipe = recipe
        self.run_id: str = recipe.run.id
        self.run_dir = run_dir
        self.num_steps = recipe.run.steps
        self.started_at = started_at
        self.journal = journal
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.groups: dict[str, TaskGroup] = {}
        self.names = GroupNames(run_mark)
        self.timeline = Timeline()
        self.standing = Standing(clock)
        self.metrics = RunMetrics(run_dir)
        self.control = RunControl(self._control_changed)
        self.ledgers = {policy: VersionLedger(policy) for policy in recipe.policies}
        self.last_metrics: dict[str, dict[str, float]] = {policy: {} for policy in recipe.policies}
        self.pool = ReplicaPool(recipe.orchestrator.lease_s, clock, lambda names: self.giving_up.orphaned(names))
        self.trainers = TrainerLeases(recipe.trained_policies, recipe.orchestrator.lease_s, clock)
        batch_configs = {name: policy.batch for name, policy in recipe.trained_policies.items()}
        self.disk: DiskOutlook | None = None  # None until it was looked at
        self.aside = Quarantine()  # records of the journal that are not used
        self.judged_before: set[str] = set()  # task groups whose verdicts an earlier process journaled
        self.rewards = RewardRules.of(recipe)
        self.experience = Experience(
            batch_configs,
            self.num_steps,
            self.counters,
            self.close_group,
            recipe.rollout.admit,
            self.rewards,
            recipe.run.seed,
            self._judged,
            recipe.run.deterministic,
        )
        self.bounds = RecordBounds.of(recipe, vocab_sizes)
        self.batches = {
            name: Batches(
                name,
                config,
                self.experience,
                journal,
                lambda: JournalReader(journal.directory),
                self._may_begin,
                lambda groups: self.giving_up.cancel_too_old(groups),
                self.bounds.fault_of_trained,
                clock,
            )
            for name, config in batch_configs.items()
        }
        self.training_orders = TrainingOrders(
            training_source,
            Curriculum(len(training_source), recipe.data.seed_of(TRAIN, recipe.run.seed), recipe.data.train.shuffle),
            self.names,
            group_size=recipe.rollout.group_size,
            sampling=sampling_of(recipe.sampling),
            timeout_s=recipe.rollout.timeout_s,
            seed=recipe.run.seed,
            curation=build_curation(recipe.data, recipe.run.seed),
            compositions=recipe.compositions(),
        )
        self.evaluations = Evaluations(
            recipe.evaluation,
            evaluation_sources,
            self.names,
            timeout_s=recipe.rollout.timeout_s,
            seed=recipe.run.seed,
            on_result=self._evaluated,
            rules=self.rewards,
            compositions=recipe.evaluation_compositions(),
            samples={
                name: data.samples_per_task for name, data in recipe.data.evaluation.items() if data.samples_per_task
            },
        )
        self.dispatcher = Dispatcher(
            pool=self.pool,
            groups=self.groups,
            experience=self.experience,
            ledgers=self.ledgers,
            max_staleness={name: config.max_staleness for name, config in batch_configs.items()},
            teachers=recipe.teachers,
            training=self.training_orders,
            evaluations=self.evaluations,
            evaluation=recipe.evaluation,
            journal=journal,
            counters=self.counters,
            fanout=FanOut({name: policy.weights.max_relays for name, policy in recipe.policies.items()}),
            clock=clock,
        )
        self.ingest = Ingest(
            self.groups,
            self.names.was_issued,
            self.ledgers,
            journal,
            self.counters,
            self._resolved,
            bounds=self.bounds,
            refusals=Refusals(self.counters, clock),
            is_member=lambda sender: self.pool.has_met(*sender),
        )
        self.giving_up = GivingUp(self.groups, self.dispatcher, self.evaluations, self.ingest)
        self.masked = MaskedSamples(self.counters, recipe.rollout.max_masked_share, recipe.rollout.masked_window)
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on versions, evaluations or run control.

        Without deadline: a run lasts as long as it lasts, and who is waited for is in its progress.
        """
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- records -----------------------------------------------------------------------------------------------------

    def _resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """A slot's first record is durable."""
        replica = self.pool.resolved(group.id, outcome.index)
        if group.is_training:
            self.masked.resolved(self.experience.policies_of(group), outcome)
        if group.is_training and group.complete:
            self.observe(group)  # ahead of what closes the task group: a recovery does not parse closed ones
        self.apply_resolved(group, outcome)
        if replica is not None and group.order.required_versions and group.complete:
            self.dispatcher.announcer.sync(replica)  # it may move on to newer weights
        for batches in self.batches.values():
            batches.notify()
        self.dispatcher.schedule()

    def observe(self, group: TaskGroup) -> None:
        """Tell the curation what a prompt brought, and remember it for a restart."""
        curation = self.training_orders.curation
        if isinstance(curation, AcceptAll):
            return
        row, rewards = self.training_orders.row_of(group), self.rewards.outcome_rewards(group.outcomes.values())
        curation.observe(row, rewards)
        record = {"task_group_id": group.id, "row": row, "rewards": rewards}
        self.journal.submit(records.OBSERVATION, group.id, lambda: record)

    def apply_resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """What a resolved slot means; also used when recovering. The last one of a training group brings verdicts."""
        if group.complete:
            self.groups.pop(group.id, None)
        if group.is_training:
            self.experience.resolved(group, outcome)
        else:
            self.evaluations.resolved(group, outcome)

    def _judged(self, task_group_id: str, verdicts: list[Verdict]) -> None:
        """Journaled ahead of what follows from it, so that no closed task group lacks its verdicts after a crash."""
        if task_group_id not in self.judged_before:
            self.journal.submit(
                records.VERDICT, task_group_id, lambda: records.verdicts_to_json(task_group_id, verdicts)
            )

    def close_group(self, task_group_id: str, reason: fates.ClosedReason) -> None:
        """Journal that nothing more comes of a task group."""
        record = {"task_group_id": task_group_id, "reason": reason.value}
        self.journal.submit(records.CLOSED, task_group_id, lambda: record)

    def batch_taken(self, training_step: int) -> None:
        """A trainer was given the batch of a step. After a policy's last one no batch can take what is still played for it."""
        if training_step < self.num_steps:
            return
        done = {name for name, batches in self.batches.items() if batches.newest_step >= self.num_steps}
        self.cancel_training_groups(fates.ClosedReason.STEPS_DONE, done)
        self.dispatcher.schedule()

    def cancel_training_groups(self, reason: fates.ClosedReason, policies: set[str] | None = None) -> None:
        """Training is over, or of groups that play no other than these ``policies``: what still runs is not wanted."""
        over = set(self.batches) if policies is None else policies
        for group in [
            g for g in self.groups.values() if g.is_training and over.issuperset(self.experience.policies_of(g))
        ]:
            del self.groups[group.id]
            self.experience.cancelled(group)
            self.counters["task_groups_cancelled"] += 1
            self.dispatcher.cancel(group.id, reason)
            self.close_group(group.id, reason)

    # --- versions ----------------------------------------------------------------------------------------------------

    def apply_version(self, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        """What a durable version means; also used when recovering."""
        policy = version.policy
        if self.ledgers[policy].record(version) and policy in self.batches:
            self._advanced(policy, version.number)
            self.last_metrics[policy] = dict(metrics)

    def lose_version(self, policy: str, number: int) -> None:
        """A version was published and its record is lost: experience is as old as it is, and its trainer offers it again."""
        self.ledgers[policy].lose(number)
        if policy in self.batches:
            self._advanced(policy, number)

    def _advanced(self, policy: str, number: int) -> None:
        if number <= self.batches[policy].newest_version:  # a lost one that was offered again
            return
        self.experience.advanced(policy, number)
        self.batches[policy].published(number)
        if policy == next(iter(self.batches)):  # a step of the run, whatever the other policies do
            self.training_orders.curation.advanced()

    @property
    def trained_ledgers(self) -> dict[str, VersionLedger]:
        """Of the policies whose versions a trainer publishes."""
        return {policy: self.ledgers[policy] for policy in self.batches}

    def adopt_version(self, version: WeightVersion) -> None:
        """Take a version 0 that nobody publishes for the newest."""
        self.journal.submit(records.VERSION, f"{version.policy}/0", lambda: records.version_to_json(version, 0, {}))
        self.apply_version(version, {})
        self._changed.set()

    def announce(self, policy: str, is_new: bool) -> None:
        """Tell the replicas of a policy's newest version, or (not ``is_new``) that its sources have changed."""
        if is_new:
            self.dispatcher.announcer.plan_fetches(policy)
        for replica in self.pool:
            self.dispatcher.announcer.sync(replica, again=not is_new)
        for batches in self.batches.values():
            batches.notify()
        self.dispatcher.schedule()
        self._changed.set()

    def _may_begin(self, training_step: int) -> bool:
        """Whether the recipe lets any policy begin this step by now."""
        behind = training_step - 1
        return not self.recipe.run.lockstep or all(led.newest_number >= behind for led in self.trained_ledgers.values())

    # --- who has gone ------------------------------------------------------------------------------------------------

    def replica_lost(self, replica: Replica) -> None:
        """A replica's lease ran out."""
        self.counters["replica_leases_lost"] += 1
        self.standing.lost[f"replica/{replica.replica_id}"] = self.clock()
        self.dispatcher.schedule()

    def trainer_lost(self, policy: str) -> None:
        """The trainer of a policy is gone: the others go on without it."""
        self.standing.lost[f"trainer/{policy}"] = self.clock()
        self.counters["trainer_leases_lost"] += 1
        self.experience.admission.absent.add(policy)
        self.dispatcher.schedule()

    # --- evaluations and run control ---------------------------------------------------------------------------------

    async def begin_evaluation(self, evaluation_id: str) -> None:
        """Queue an evaluation of the newest versions; one that is known is left alone."""
        if self.evaluations.known(evaluation_id):
            return
        if not self.evaluations.possible:
            raise StateError("this recipe has no data.evaluation: there is nothing to evaluate on")
        if any(ledger.newest is None for ledger in self.ledgers.values()):
            raise StateError("no weight version is published yet: there is nothing to evaluate")
        versions = {policy: ledger.newest_number for policy, ledger in self.ledgers.items()}
        started = {
            "evaluation_id": evaluation_id,
            "versions": [{"policy": policy, "number": number} for policy, number in versions.items()],
        }
        await self.journal.append(records.EVALUATION_START, evaluation_id, lambda: started)
        self.evaluations.begin(evaluation_id, versions)
        log.info("evaluation.started", evaluation=evaluation_id, versions=versions)
        self.dispatcher.schedule()

    def _evaluated(self, result: EvaluationResult) -> None:
        log.info(
            "evaluation.finished", evaluation=result.name, mean_reward=result.mean_reward, failed=result.num_failed
        )
        self.journal.submit(records.EVALUATION, result.name, lambda: records.evaluation_to_json(result))
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
        """Make pause and end felt; also used when recovering."""
        control = self.control
        for batches in self.batches.values():
            batches.paused = control.paused or control.ended
            batches.notify()
        self.dispatcher.hold("ended", f"the run has {control.phase.value}" if control.ended else "")
        self.dispatcher.hold("paused", "the run is paused" if control.paused else "")

    def pause(self) -> None:
        if self.control.pause():
            self.trainers.send_all(PauseTraining())

    def resume(self) -> None:
        if self.control.resume():
            self.trainers.send_all(ResumeTraining())

    def write_state(self) -> None:
        """Journal what no other record says."""
        state = {
            "phase": self.control.phase.value,
            "paused": self.control.paused,
            "counters": records.pairs(self.counters),
            "timeline": records.pairs(self.timeline.totals()),
        }
        self.journal.submit(records.STATE, "", lambda: state)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for batches in self.batches.values():
            batches.close()
        self.pool.close()
        self.trainers.close()

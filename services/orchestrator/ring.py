"""The orchestrator's parts put together: what happens when a peer says something.

    replica --record--> Ingest --durable--> Experience / Evaluations --> Batches --> trainer
       ^                                                                               |
       '------------------ Dispatcher <----- VersionLedger <---------version-----------'

The parts do not know the ring; it passes them what they need and reacts to what they report. Knows nothing about grpc.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from services.common.accounts import AccountState, PeerState
from services.common.config.recipe import Recipe
from services.common.errors import InvalidRequestError, StateError, UnknownPolicyError
from services.common.types import WeightVersion
from services.orchestrator.batches import Batch, Batches
from services.orchestrator.commands import LeavePool, PauseTraining, ResumeTraining, StopTraining
from services.orchestrator.curation import AcceptAll, build_curation
from services.orchestrator.curriculum import Curriculum
from services.orchestrator.datasets import TaskSource
from services.orchestrator.dispatcher import Dispatcher
from services.orchestrator.evaluation import Evaluations
from services.orchestrator.experience import Experience
from services.orchestrator.fanout import FanOut
from services.orchestrator.giving_up import GivingUp
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.ingest import Ingest
from services.orchestrator.journal import records
from services.orchestrator.journal.records import EvaluationResult, Verdict
from services.orchestrator.journal.writer import Journal, JournalReader
from services.orchestrator.metrics import RunMetrics
from services.orchestrator.orders import GroupNames, TrainingOrders, sampling_of
from services.orchestrator.pool import Held, Hello, Replica, ReplicaPool
from services.orchestrator.run_control import RunControl
from services.orchestrator.stalls.standing import Standing
from services.orchestrator.timeline import Stretch, Timeline
from services.orchestrator.trainers import Trainer, TrainerLeases
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
    ) -> None:
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
        self.trainers = TrainerLeases(recipe.policies, recipe.orchestrator.lease_s, clock)
        batch_configs = {name: policy.batch for name, policy in recipe.policies.items()}
        self.experience = Experience(batch_configs, self.num_steps, self.counters, self._closed, recipe.rollout.admit)
        self.batches = {
            name: Batches(
                name, config, self.experience, journal, lambda: JournalReader(journal.directory), self._may_begin
            )
            for name, config in batch_configs.items()
        }
        self.training_orders = TrainingOrders(
            training_source,
            Curriculum(len(training_source), recipe.run.seed + recipe.data.train.seed, recipe.data.train.shuffle),
            self.names,
            group_size=recipe.rollout.group_size,
            sampling=sampling_of(recipe.sampling),
            timeout_s=recipe.rollout.timeout_s,
            seed=recipe.run.seed,
            curation=build_curation(recipe.data.curation, recipe.run.seed),
            compositions=recipe.compositions(),
        )
        self.evaluations = Evaluations(
            recipe.evaluation,
            evaluation_sources,
            self.names,
            timeout_s=recipe.rollout.timeout_s,
            seed=recipe.run.seed,
            on_result=self._evaluated,
            compositions=recipe.evaluation_compositions(),
        )
        self.dispatcher = Dispatcher(
            pool=self.pool,
            groups=self.groups,
            experience=self.experience,
            ledgers=self.ledgers,
            max_staleness={name: config.max_staleness for name, config in batch_configs.items()},
            training=self.training_orders,
            evaluations=self.evaluations,
            evaluation=recipe.evaluation,
            journal=journal,
            counters=self.counters,
            fanout=FanOut({name: policy.weights.max_relays for name, policy in recipe.policies.items()}),
            clock=clock,
        )
        self.ingest = Ingest(self.groups, self.names.was_issued, self.ledgers, journal, self.counters, self._resolved)
        self.giving_up = GivingUp(self.groups, self.dispatcher, self.evaluations, self.ingest)
        self._publishing = {policy: asyncio.Lock() for policy in recipe.policies}
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on versions, evaluations or run control.

        Without deadline: a run lasts as long as it lasts, and who is waited for is in its progress.
        """
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- replicas ----------------------------------------------------------------------------------------------------

    def join_replica(self, hello: Hello) -> Replica:
        replica = self.pool.join(hello)
        self.standing.lost.pop(f"replica/{hello.replica_id}", None)
        log.info("replica.joined", replica=hello.replica_id, incarnation=hello.incarnation, slots=hello.num_slots)
        self._adopt_checkpoints(hello.held)
        self.dispatcher.adopt(replica, hello.running)
        self.dispatcher.rejoined(replica)
        if self.control.ended:
            self.pool.send(replica, LeavePool(f"the run has {self.control.phase.value}"))
        elif replica.draining:
            self.pool.send(replica, LeavePool("draining"))
        return replica

    def _adopt_checkpoints(self, held: Mapping[str, Held]) -> None:
        """A run that only evaluates has no trainer to publish version 0: the first replica says what it loaded, and every
        other must hold the same."""
        for policy, found in held.items() if not self.num_steps else ():
            if policy in self.ledgers and self.ledgers[policy].newest is None and found.number == 0:
                self._adopt(WeightVersion(policy=policy, number=0, digest=found.digest))

    def _adopt(self, version: WeightVersion) -> None:
        self.journal.submit(records.VERSION, f"{version.policy}/0", lambda: records.version_to_json(version, 0, {}))
        self.apply_version(version, {})
        self._changed.set()

    def report_replica(
        self,
        replica_id: str,
        incarnation: str,
        *,
        held: Mapping[str, Held],
        num_tokens: int,
        emission: Iterable[Stretch],
        gauges: Mapping[str, float],
        running: Iterable[str] | None = None,
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
    ) -> None:
        replica = self.pool.report(
            replica_id,
            incarnation,
            held=held,
            num_tokens=num_tokens,
            gauges=gauges,
            running=running,
            accounts=accounts,
            peers=peers,
        )
        self.timeline.emitted(replica_id, emission)
        self.dispatcher.sync_versions(replica)
        self.dispatcher.schedule()

    def replica_lost(self, replica: Replica) -> None:
        """A replica's lease ran out."""
        self.counters["replica_leases_lost"] += 1
        self.standing.lost[f"replica/{replica.replica_id}"] = self.clock()
        self.dispatcher.schedule()

    # --- records -----------------------------------------------------------------------------------------------------

    def _resolved(self, group: TaskGroup, outcome: Outcome) -> None:
        """A slot's first record is durable."""
        replica = self.pool.resolved(group.id, outcome.index)
        if verdicts := self.apply_resolved(group, outcome):
            self.journal.submit(records.VERDICT, group.id, lambda: records.verdicts_to_json(group.id, verdicts))
        if group.is_training and group.complete:
            self._observe(group)
        if replica is not None and group.order.required_versions and group.complete:
            self.dispatcher.sync_versions(replica)  # it may move on to newer weights
        for batches in self.batches.values():
            batches.notify()
        self.dispatcher.schedule()

    def _observe(self, group: TaskGroup) -> None:
        """Tell the curation what a prompt brought, and remember it for a restart."""
        curation = self.training_orders.curation
        if isinstance(curation, AcceptAll):
            return
        row, rewards = self.training_orders.row_of(group), [t.reward for t in group.trajectories]
        curation.observe(row, rewards)
        record = {"task_group_id": group.id, "row": row, "rewards": rewards}
        self.journal.submit(records.OBSERVATION, group.id, lambda: record)

    def apply_resolved(self, group: TaskGroup, outcome: Outcome) -> list[Verdict]:
        """What a resolved slot means; also used when recovering. The last one of a training group brings verdicts."""
        if group.complete:
            self.groups.pop(group.id, None)
        if group.is_training:
            return self.experience.resolved(group, outcome)
        self.evaluations.resolved(group, outcome)
        return []

    def _closed(self, task_group_id: str, reason: str) -> None:
        record = {"task_group_id": task_group_id, "reason": reason}
        self.journal.submit(records.CLOSED, task_group_id, lambda: record)

    def cancel_training_groups(self, reason: str) -> None:
        """Training is over: what still runs is not wanted."""
        for group in [g for g in self.groups.values() if g.is_training]:
            del self.groups[group.id]
            self.experience.cancelled(group)
            self.counters["task_groups_cancelled"] += 1
            self.dispatcher.cancel(group.id, reason)
            self._closed(group.id, reason)

    # --- trainers ----------------------------------------------------------------------------------------------------

    def policy(self, name: str) -> str:
        if name not in self.ledgers:
            raise UnknownPolicyError(f"no policy {name!r} in this run; it has {', '.join(self.ledgers)}")
        return name

    def join_trainer(
        self, policy: str, incarnation: str, num_ranks: int, recovered_version: int, labels: Mapping[str, str]
    ) -> Trainer:
        trainer = self.trainers.join(self.policy(policy), incarnation, num_ranks, recovered_version, labels)
        log.info("trainer.joined", policy=policy, incarnation=incarnation, recovered_version=recovered_version)
        self.standing.lost.pop(f"trainer/{policy}", None)
        self.experience.admission.absent.discard(policy)
        assert trainer.mailbox is not None
        if self.control.ended:
            trainer.mailbox.put(StopTraining(f"the run has {self.control.phase.value}"))
        elif self.control.paused:
            trainer.mailbox.put(PauseTraining())
        return trainer

    def trainer_lost(self, policy: str) -> None:
        """The trainer of a policy is gone: the others go on without it."""
        self.standing.lost[f"trainer/{policy}"] = self.clock()
        self.counters["trainer_leases_lost"] += 1
        self.experience.admission.absent.add(policy)
        self.dispatcher.schedule()

    def _may_begin(self, training_step: int) -> bool:
        """Whether the recipe lets any policy begin this step by now."""
        behind = training_step - 1
        return not self.recipe.run.lockstep or all(led.newest_number >= behind for led in self.ledgers.values())

    async def pull_batch(self, policy: str, training_step: int, timeout_s: float) -> Batch:
        if training_step > self.num_steps:
            raise InvalidRequestError(f"training step {training_step} of {policy}: the run has {self.num_steps} steps")
        return await self.batches[self.policy(policy)].get(training_step, timeout_s)

    async def publish(
        self,
        version: WeightVersion,
        incarnation: str,
        *,
        metrics: Mapping[str, float],
        compute: Iterable[Stretch],
        checkpoint_step: int,
    ) -> int:
        """Record a version in the ledger and tell the replicas; returns the newest number.

        Raises:
            VersionConflictError, LeaseLostError, InvalidRequestError
        """
        policy = self.policy(version.policy)
        ledger = self.ledgers[policy]
        async with self._publishing[policy]:
            trainer = self.trainers.check(policy, incarnation)
            if trainer is not None:
                trainer.checkpoint_step = max(trainer.checkpoint_step, checkpoint_step)
            stretches = list(compute)
            self.timeline.computed(policy, stretches)
            is_new = ledger.check(version)
            if version.number > self.num_steps:
                raise InvalidRequestError(f"version {version.number} of {policy}: the run has {self.num_steps} steps")
            if is_new or ledger.get(version.number) != version:
                await self.journal.append(
                    records.VERSION,
                    f"{policy}/{version.number}",
                    lambda: records.version_to_json(version, checkpoint_step, metrics, stretches),
                    apply=lambda: self.apply_version(version, metrics),
                )
                self._announce(policy, is_new)
            if is_new:
                self._write_step(version, metrics, sum(end - begin for begin, end in stretches))
        return ledger.newest_number

    def apply_version(self, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        """What a durable version means; also used when recovering."""
        policy = version.policy
        if self.ledgers[policy].record(version):
            self.experience.advanced(policy, version.number)
            self.batches[policy].newest_version = version.number
            self.last_metrics[policy] = dict(metrics)
            if policy == next(iter(self.ledgers)):  # a step of the run, whatever the other policies do
                self.training_orders.curation.advanced()

    def _announce(self, policy: str, is_new: bool) -> None:
        if is_new:
            self.dispatcher.plan_fetches(policy)
        for replica in self.pool:
            self.dispatcher.sync_versions(replica, again=not is_new)
        for batches in self.batches.values():
            batches.notify()
        self.dispatcher.schedule()
        self._changed.set()

    def _write_step(self, version: WeightVersion, metrics: Mapping[str, float], compute_s: float) -> None:
        policy, step = version.policy, version.number
        log.info("version.published", policy=policy, version=step, digest=version.digest)
        if step == 0:
            return
        statistics = dict(self.batches[policy].statistics.pop(step, {}))
        if "reward_mean" not in statistics and "batch_reward_mean" in statistics:
            statistics["reward_mean"] = statistics["batch_reward_mean"]  # no trajectory came in since the step before
        values = {
            **statistics,
            **{f"trainer/{name}": value for name, value in metrics.items()},
            **self.training_orders.curation.gauges(),
            "compute_s": compute_s,
            "elapsed_s": time.time() - self.started_at,
        }
        self.last_metrics[policy] = values
        self.metrics.training_step(policy, step, values)
        self.write_state()

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

    def dismiss(self, reason: str) -> None:
        """The run has ended: trainers and replicas may leave."""
        self.trainers.send_all(StopTraining(reason))
        for replica in self.pool:
            replica.draining = True
            self.pool.send(replica, LeavePool(reason))

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for batches in self.batches.values():
            batches.close()
        self.pool.close()
        self.trainers.close()

"""Applies published versions to the ledgers, batches and curation, and answers how far training is.

    durable version -> ledger -> staleness of the experience, batches, curation -> announcement to the replicas

Independent of grpc and of the trainers' leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.records.types import WeightVersion
from services.orchestrator.buffer.batches import Batches
from services.orchestrator.buffer.pipeline import ExperiencePipeline
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.dispatch.threshold import Threshold
from services.orchestrator.journal import records
from services.orchestrator.journal.writer import Journal
from services.orchestrator.state.versions import VersionLedger
from services.orchestrator.tasks.orders import TrainingOrders


class PublishedVersions:
    def __init__(
        self,
        *,
        ledgers: Mapping[str, VersionLedger],
        batches: Mapping[str, Batches],
        experience: ExperiencePipeline,
        curation: TrainingOrders,
        threshold: Threshold | None,
        dispatcher: Dispatcher,
        journal: Journal,
        num_steps: int,
        lockstep: bool,
        on_change: Callable[[], None],
    ) -> None:
        """``batches`` are of the policies with a trainer; ``on_change`` is called after every live change."""
        self._ledgers = ledgers
        self._batches = batches
        self._experience = experience
        self._curation = curation
        self._threshold = threshold
        self._dispatcher = dispatcher
        self._journal = journal
        self._lockstep = lockstep
        self._on_change = on_change
        self.num_steps = num_steps
        self.trained_ledgers = {policy: ledgers[policy] for policy in batches}  # of the policies with a trainer
        self.last_metrics: dict[str, dict[str, float]] = {policy: {} for policy in ledgers}  # of the newest versions

    def apply(self, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        """Apply a durable version, live or during recovery."""
        policy = version.policy
        if self._ledgers[policy].record(version) and policy in self._batches:
            self._advanced(policy, version.number)
            self.last_metrics[policy] = dict(metrics)

    def lose(self, policy: str, number: int) -> None:
        """Handle a published version with a lost record: advance the staleness; the trainer offers the version again."""
        self._ledgers[policy].lose(number)
        if policy in self._batches:
            self._advanced(policy, number)

    def _advanced(self, policy: str, number: int) -> None:
        if number <= self._batches[policy].newest_version:  # a lost one that was offered again
            return
        self._experience.advanced(policy, number)
        self._batches[policy].published(number)
        if policy == next(iter(self._batches)):  # a step of the run, regardless of other policies
            self._curation.advanced()

    def adopt(self, version: WeightVersion) -> None:
        """Record version 0 of a policy without a trainer as the newest."""
        self._journal.submit(records.VERSION, f"{version.policy}/0", lambda: records.version_to_json(version, 0, {}))
        self.apply(version, {})
        self._on_change()

    def announce(self, policy: str, is_new: bool) -> None:
        """Announce a policy's newest version to the replicas, or (not ``is_new``) its changed sources."""
        if is_new:
            self._dispatcher.announcer.plan_fetches(policy)
        self._dispatcher.announcer.sync_all(again=not is_new)
        for batches in self._batches.values():
            batches.notify()
        self._dispatcher.schedule()
        self._on_change()

    def may_begin(self, training_step: int) -> bool:
        """Whether the recipe lets any policy begin this step by now."""
        behind = training_step - 1
        if self.reached_threshold:
            return False
        return not self._lockstep or all(ledger.newest_number >= behind for ledger in self.trained_ledgers.values())

    @property
    def reached_threshold(self) -> bool:
        """Whether training ends before its last step because ``run.until`` holds: no further batch begins."""
        return self._threshold is not None and self._threshold.reached

    def last_step(self, policy: str) -> int:
        """The last training step of a policy, as far as known."""
        return self._batches[policy].newest_step if self.reached_threshold else self.num_steps

    @property
    def all_trained(self) -> bool:
        """Whether every policy has taken its last step, with its version published."""
        if self.reached_threshold:
            return all(batches.settled for batches in self._batches.values())
        return all(ledger.newest_number >= self.num_steps for ledger in self.trained_ledgers.values())

    @property
    def ended_early(self) -> bool:
        """Whether training is over before its last step: a trainer does not know that its newest step is the last."""
        return self.reached_threshold and self.all_trained

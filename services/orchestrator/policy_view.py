"""One trained policy, as monitoring reads it from the parts that hold its state."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.config.training import BatchConfig
from services.orchestrator.admission import Account
from services.orchestrator.buffer.batches import Batches, ExperiencePipeline
from services.orchestrator.trainers import Trainer, TrainerLeases
from services.orchestrator.versions import VersionLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """Refers to live parts: every read gives the present state."""

    name: str
    config: BatchConfig
    ledger: VersionLedger
    batches: Batches
    experience: ExperiencePipeline
    trainers: TrainerLeases

    @property
    def trainer(self) -> Trainer | None:
        """The trainer with the policy's lease."""
        return self.trainers.get(self.name)

    @property
    def account(self) -> Account:
        """Quota account of the policy."""
        return self.experience.admission.accounts[self.name]

    @property
    def quota_full(self) -> bool:
        """Whether the staleness bound stops new task groups of the policy."""
        return self.account.steps_left > 0 and not self.account.has_room()

    @property
    def num_buffered(self) -> int:
        """Sequences that wait for a batch."""
        return self.experience.buffers[self.name].num_sequences

    @property
    def lacks(self) -> str:
        """The source that the next batch waits for although there are sequences enough; empty for none."""
        return self.experience.buffers[self.name].lacks

    @property
    def exhausted(self) -> dict[str, int]:
        """Sources that batches do not wait for, and how many of their task groups in a row gave nothing to train."""
        return self.experience.mixtures[self.name].exhausted

"""The trainers: one lease per policy, and commands to the holder of each lease.

The orchestrator waits for a lost trainer without a limit: the policy waits, and the progress names the wait.
Independent of grpc and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from services.common.errors import LeaseLostError, SupersededError, UnknownPolicyError
from services.common.telemetry.accounts import AccountState, PeerState
from services.orchestrator.members.commands import Mailbox, TrainerCommand


@dataclass(slots=True, kw_only=True)
class Trainer:
    policy: str
    incarnation: str
    num_ranks: int
    recovered_version: int
    lease_until: float
    labels: Mapping[str, str] = field(default_factory=dict)
    mailbox: Mailbox[TrainerCommand] | None = None
    state: str = "joined"
    training_step: int = 0
    checkpoint_step: int = 0
    kept_checkpoint_steps: tuple[int, ...] = ()  # durable checkpoints that the trainer can start from, ascending
    gauges: Mapping[str, float] = field(default_factory=dict)
    num_reports: int = 0
    device_turn: int = 0  # the newest that the trainer has carried out
    refusal: str = ""  # why the trainer does not train the batch of its step
    rank_reports: dict[int, int] = field(default_factory=dict)  # of ranks other than the first: reports by rank
    accounts: dict[int, tuple[AccountState, ...]] = field(default_factory=dict)  # by rank
    peers: tuple[PeerState, ...] = ()  # state of its dependencies, as the trainer reports them

    @property
    def oldest_checkpoint_step(self) -> int:
        """Batches after this step may be trained again; 0 while there is no checkpoint, so all of them."""
        return min(self.kept_checkpoint_steps, default=0)


class TrainerLeases:
    def __init__(self, policies: Mapping[str, object], lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._trainers: dict[str, Trainer | None] = dict.fromkeys(policies)

    def __iter__(self) -> Iterator[Trainer]:
        return iter([trainer for trainer in self._trainers.values() if trainer is not None])

    def known(self, policy: str) -> str:
        """The policy's name, if the run has such a policy; else raises UnknownPolicyError."""
        if policy not in self._trainers:
            raise UnknownPolicyError(f"no policy {policy!r} in this run; it has {', '.join(self._trainers)}")
        return policy

    def get(self, policy: str) -> Trainer | None:
        """The policy's trainer; None without one."""
        return self._trainers[self.known(policy)]

    def join(
        self,
        policy: str,
        incarnation: str,
        num_ranks: int,
        recovered_version: int,
        labels: Mapping[str, str],
        kept_checkpoint_steps: Iterable[int] = (),
    ) -> Trainer:
        """A stream of a trainer begins; a new incarnation ends the lease of the older one."""
        trainer = self.get(policy)
        if trainer is not None and trainer.mailbox is not None:
            if trainer.incarnation == incarnation:
                trainer.mailbox.close(SupersededError("the same trainer opened a newer stream"))
            else:
                trainer.mailbox.close(LeaseLostError(f"another trainer of {policy} has joined", holder=incarnation))
        if trainer is None or trainer.incarnation != incarnation:
            trainer = Trainer(
                policy=policy,
                incarnation=incarnation,
                num_ranks=num_ranks,
                recovered_version=recovered_version,
                lease_until=0.0,
                labels=labels,
                checkpoint_step=max(recovered_version, 0),
            )
            self._trainers[policy] = trainer
        trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
        trainer.mailbox = Mailbox()
        trainer.lease_until = self._clock() + self.lease_s
        return trainer

    def check(self, policy: str, incarnation: str) -> Trainer | None:
        """The lease holder, None without one (after a restart of the orchestrator).

        Raises:
            LeaseLostError: another incarnation holds the lease.
        """
        trainer = self.get(policy)
        if trainer is not None and trainer.incarnation != incarnation:
            raise LeaseLostError(f"another trainer of {policy} has joined", policy=policy, holder=trainer.incarnation)
        return trainer

    def report(
        self,
        policy: str,
        incarnation: str,
        *,
        training_step: int,
        state: str,
        checkpoint_step: int,
        gauges: Mapping[str, float],
        kept_checkpoint_steps: Iterable[int] = (),
        device_turn: int = 0,
        refusal: str = "",
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
    ) -> Trainer:
        """Renew the lease; raises LeaseLostError for an ended lease or the lease of another incarnation."""
        trainer = self.check(policy, incarnation)
        if trainer is None:
            raise LeaseLostError(f"the trainer of {policy} holds no lease: join again", policy=policy)
        trainer.training_step, trainer.state, trainer.gauges = training_step, state, gauges
        trainer.checkpoint_step = max(trainer.checkpoint_step, checkpoint_step)
        trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
        trainer.num_reports += 1
        trainer.device_turn = device_turn
        trainer.refusal = refusal
        trainer.accounts[0], trainer.peers = accounts, peers
        trainer.lease_until = self._clock() + self.lease_s
        return trainer

    def report_rank(self, policy: str, rank: int, accounts: tuple[AccountState, ...]) -> None:
        """A rank other than the first says where its time goes. The lease is the first one's business."""
        trainer = self.get(policy)
        if trainer is not None and rank < trainer.num_ranks:
            trainer.rank_reports[rank] = trainer.rank_reports.get(rank, 0) + 1
            trainer.accounts[rank] = accounts

    def prolong(self, seconds: float) -> None:
        """Extend all leases by the seconds during which this process did not run and received no reports."""
        for trainer in self:
            trainer.lease_until += seconds

    def stream_ended(self, trainer: Trainer, mailbox: Mailbox[TrainerCommand]) -> None:
        if trainer.mailbox is mailbox:
            trainer.mailbox = None

    def expire(self) -> list[Trainer]:
        now = self._clock()
        lost = [trainer for trainer in self if trainer.lease_until <= now]
        for trainer in lost:
            if trainer.mailbox is not None:
                trainer.mailbox.close(
                    LeaseLostError(f"the trainer of {trainer.policy} did not report for {self.lease_s} s")
                )
                trainer.mailbox = None
            self._trainers[trainer.policy] = None
        return lost

    def send_all(self, command: TrainerCommand) -> None:
        for trainer in self:
            if trainer.mailbox is not None:
                trainer.mailbox.put(command)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for trainer in self:
            if trainer.mailbox is not None:
                trainer.mailbox.close()

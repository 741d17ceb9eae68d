"""Facts for the stall rules: the run at one moment, as plain records; and the causes of stalls, with the advice for each.

A cause is one word, for logs, tests and docs. Independent of the core.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.components import Component
from services.common.telemetry.log_events import LogEvent


class Cause(enum.StrEnum):
    SILENT = "silent"
    LOST = "lost"
    ABSENT = "absent"
    STUCK = "stuck"
    FROZEN = "frozen"
    NO_FREE_DISK = "no_free_disk"
    JOURNAL_STUCK = "journal_stuck"
    STOOD_STILL = "stood_still"
    CLOCK_JUMPED = "clock_jumped"
    ORDER_LOST = "order_lost"
    NOT_ACKNOWLEDGED = "not_acknowledged"
    WEIGHTS_NOT_ARRIVING = "weights_not_arriving"
    UNREACHABLE = "unreachable"
    NO_WORKERS = "no_workers"
    EXHAUSTED = "exhausted"
    ALL_FILTERED = "all_filtered"
    ALL_FAIL = "all_fail"
    MASKED = "masked"
    NUMERICS = "numerics"
    RECORDS_REFUSED = "records_refused"
    NOTHING_TO_PLAY = "nothing_to_play"
    QUOTA_FULL = "quota_full"
    NO_PROGRESS = "no_progress"


_CODE_CHANGES = (
    "changed Python code is loaded by new processes only: interrupt the run, then `rollmill run --resume RUN`"
)
ADVICE = {
    Cause.SILENT: "check that its process and machine run and reach the orchestrator (stopped or frozen process, cut or half-open "
    f"connection); for a blocked event loop, its log has the stack ({LogEvent.LOOP_BLOCKED})",
    Cause.LOST: "start the component again; the work resumes without further action",
    Cause.ABSENT: "start the component, or find the reason in its log",
    Cause.STUCK: f"its log has the stack of the hanging thread ({LogEvent.THREAD_STUCK}); kill -9 the process: the supervisor "
    "starts a new one, and no acknowledged data is lost",
    Cause.FROZEN: "kill -9 the replica: the engine no longer computes, and only a new process helps",
    Cause.NO_FREE_DISK: "free space on the disk of the run directory; the run continues without further action",
    Cause.JOURNAL_STUCK: "check the file system of the run directory, such as a hanging network mount",
    Cause.STOOD_STILL: "check the machine: the orchestrator's process was stopped or starved; leases were extended",
    Cause.CLOCK_JUMPED: "let a time service slew the clock instead of setting it; timestamps of this run jump",
    Cause.ORDER_LOST: "the orchestrator sends the order again; if the stall stays, check the network in between",
    Cause.NOT_ACKNOWLEDGED: "check the network between replica and orchestrator: records leave faster than they arrive",
    Cause.WEIGHTS_NOT_ARRIVING: f"check the network to the publisher, and {LogEvent.WEIGHTS_KEPT_OLD} in the replica's log",
    Cause.UNREACHABLE: "start the component, or check the network in between; jobs are kept and sent again",
    Cause.NO_WORKERS: "start workers: python -m services.envgateway.worker",
    Cause.EXHAUSTED: "raise envgateway.sandbox.num_slots, or lower the limits of the programs that fill it",
    Cause.ALL_FILTERED: "all rewards of a group are equal, so the groups have no gradient: use easier or harder tasks, a finer "
    "reward, or batch.dynamic_sampling: false",
    Cause.ALL_FAIL: f"fix the cause in the failures, then run `rollmill resume` if the run was paused; {_CODE_CHANGES}",
    Cause.MASKED: f"fix the named causes, or raise rollout.max_masked_share, then run `rollmill resume`; {_CODE_CHANGES}",
    Cause.NUMERICS: "repair the named cause and start another run, or raise policies.<name>.trainer.max_mismatch "
    "(docs/doctor.md)",
    Cause.RECORDS_REFUSED: "fix the named reason at that replica (model, tokenizer, settings, workflow or reward), or end its "
    "process (SIGTERM); its rollouts are lost meanwhile (docs/protocol.md has the bounds)",
    Cause.NOTHING_TO_PLAY: "data.curation refuses the whole dataset: loosen its limits, or add tasks",
    Cause.QUOTA_FULL: "outstanding sequences fill the quota without a full batch: raise batch.max_staleness or lower "
    "batch.size",
    Cause.NO_PROGRESS: "look at the log of the component at the end of the chain, and at the function that is named",
}


class Hold(enum.StrEnum):
    """Names of the reasons that block all issues of task groups."""

    ENDED = "ended"
    PAUSED = "paused"
    DISK = "disk"
    GATEWAY = "envgateway"
    ALL_FAIL = "all fail"
    MASKED = "masked"
    NUMERICS = "numerics"


PAUSED_ITSELF = frozenset({Hold.ALL_FAIL, Hold.MASKED, Hold.NUMERICS})  # the run has paused itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """A replica with a lease."""

    component: Component
    num_reports: int = 0
    num_running: int = 0  # slots that the replica was given
    stream_open: bool = True
    unseen_orders: tuple[float, ...] = ()  # issue times of task groups that the replica has never confirmed
    untaken: Mapping[str, int] = field(default_factory=dict)  # policies whose announced version is not held
    peers: tuple[PeerState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFacts:
    """A sender without a recently accepted record."""

    component: Component
    number: int  # of records refused in a row
    since: float  # monotonic
    newest: float
    detail: str  # of the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """The trainer of a policy."""

    policy: str
    wanted: bool = True  # the trainer has steps left
    joined: bool = True
    num_reports: int = 0
    state: str = ""
    refusal: str = ""  # why it does not train its batch
    num_ranks: int = 1
    rank_reports: Mapping[int, int] = field(default_factory=dict)  # of the other ranks: reports by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Training progress of a policy."""

    policy: str
    batch_size: int = 1
    num_kept: int = 0  # sequences that were kept for training
    num_filtered: int = 0  # sequences dropped because a group's rewards were equal
    num_filtered_in_a_row: int = 0  # sequences dropped because a group's rewards were equal, since one was kept
    quota_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The run at one moment. ``now`` is monotonic, ``wall`` the time of day; both in seconds."""

    now: float
    wall: float = 0.0
    ended: bool = False
    paused: bool = False  # by a person
    training: bool = True  # training groups may be issued
    held_back: Mapping[Hold, str] = field(default_factory=dict)  # reasons that block all issues: name, reason
    journal_blocked: str = ""
    journal_oldest_s: float = 0.0  # age of the oldest record that is not written
    replicas: tuple[ReplicaFacts, ...] = ()
    lost: Mapping[Component, float] = field(default_factory=dict)  # components with a lost lease: time of the loss
    trainers: tuple[TrainerFacts, ...] = ()
    policies: tuple[PolicyFacts, ...] = ()
    accounts: Mapping[Component, AccountState] = field(default_factory=dict)
    peers: Mapping[Component, PeerState] = field(default_factory=dict)  # by the best report of each
    failures_in_a_row: int = 0
    last_failure: str = ""
    refused: tuple[RefusedFacts, ...] = ()
    group_size: int = 1
    nothing_to_play: bool = False  # curation refused a whole pass of the data
    progress: Mapping[str, float] = field(default_factory=dict)  # counters that grow while the run goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A stalled component by one rule. ``inferred`` from waits, or else seen directly."""

    component: Component
    cause: Cause
    detail: str
    since: float  # monotonic
    inferred: bool = False

    @property
    def key(self) -> tuple[Component, Cause]:
        return self.component, self.cause

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]

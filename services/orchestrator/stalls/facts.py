"""Facts for the stall rules: the run at one moment, as plain records. Independent of the core."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.components import Component
from services.orchestrator.stalls.causes import ADVICE, Cause


class Hold(enum.StrEnum):
    """Names of the reasons that block all issues of task groups."""

    ENDED = "ended"
    PAUSED = "paused"
    DISK = "disk"
    GATEWAY = "envgateway"
    ALL_FAIL = "all fail"
    MASKED = "masked"


PAUSED_ITSELF = frozenset({Hold.ALL_FAIL, Hold.MASKED})  # the run has paused itself


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
    num_ranks: int = 1
    rank_reports: Mapping[int, int] = field(default_factory=dict)  # of the other ranks: reports by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Training progress of a policy."""

    policy: str
    batch_size: int = 1
    num_kept: int = 0  # sequences that were kept for training
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

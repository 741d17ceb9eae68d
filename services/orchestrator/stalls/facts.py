"""What the rules look at: the run at one moment, as plain records. Knows neither the ring nor where anything comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.accounts import AccountState, PeerState
from services.orchestrator.stalls.causes import ADVICE, Cause

ORCHESTRATOR = "orchestrator"
GATEWAY = "envgateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """A replica that holds a lease."""

    component: str
    num_reports: int = 0
    num_running: int = 0  # slots that it was given
    stream_open: bool = True
    unseen_orders: tuple[float, ...] = ()  # when task groups were given to it that it has never said it plays
    untaken: Mapping[str, int] = field(default_factory=dict)  # policies of which it was told a newer version: held one
    peers: tuple[PeerState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFacts:
    """A sender of which no record was taken lately."""

    component: str
    number: int  # of records refused in a row
    since: float  # monotonic
    newest: float
    detail: str  # of the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """The trainer of a policy."""

    policy: str
    wanted: bool = True  # it has steps left
    joined: bool = True
    num_reports: int = 0
    state: str = ""
    num_ranks: int = 1
    rank_reports: Mapping[int, int] = field(default_factory=dict)  # of the other ranks: reports by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Where the training of a policy stands."""

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
    held_back: Mapping[str, str] = field(default_factory=dict)  # why nothing may be issued: name, reason
    journal_blocked: str = ""
    journal_oldest_s: float = 0.0  # age of the oldest record that is not written
    replicas: tuple[ReplicaFacts, ...] = ()
    lost: Mapping[str, float] = field(default_factory=dict)  # components whose lease ran out: when
    trainers: tuple[TrainerFacts, ...] = ()
    policies: tuple[PolicyFacts, ...] = ()
    accounts: Mapping[str, AccountState] = field(default_factory=dict)
    peers: Mapping[str, PeerState] = field(default_factory=dict)  # as whoever hears them best sees them
    failures_in_a_row: int = 0
    last_failure: str = ""
    refused: tuple[RefusedFacts, ...] = ()
    group_size: int = 1
    nothing_to_play: bool = False  # curation refused a whole pass of the data
    progress: Mapping[str, float] = field(default_factory=dict)  # counters that grow while the run goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A component that stands still, as one rule sees it. ``inferred`` from waits, or else seen directly."""

    component: str
    cause: Cause
    detail: str
    since: float  # monotonic
    inferred: bool = False

    @property
    def key(self) -> tuple[str, Cause]:
        return self.component, self.cause

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]

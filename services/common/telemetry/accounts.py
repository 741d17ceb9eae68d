"""Time accounts: the time of a component in each activity, and the component waited for.

A ``TimeAccount`` has lanes (a trainer has one, a replica one per slot), and at each moment each lane is in exactly one
activity: entering one leaves the other. So the seconds of all activities sum to lanes x lifetime by construction,
however tasks and threads interleave. Of nested activities only the innermost counts; the outer one continues
afterwards.

    with account.lane(ActivityName.RUNNING_WORKFLOW):          # one of the free lanes, for this task and its children
        with account.during(ActivityName.GENERATING, on=engine("model0")):
            ...

Independent of gRPC and of services. Every method may be called from any thread.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

# --- Names of activities and waits, which time accounts report and the stall detector reads.


ActivityLabel = NewType("ActivityLabel", str)
"""An activity with a subject, such as the path of a reward function, or one that another process has reported."""


class ActivityName(enum.StrEnum):
    # of every component
    IDLE = "idle"
    STARTING = "starting"
    PAUSED = "paused"
    # of a trainer's ranks, which report them as their state too
    WAITING_FOR_BATCH = "waiting for a batch"
    TRAINING = "training"
    REPLAYING = "replaying"
    PUBLISHING = "publishing"
    ANNOUNCING = "announcing a version"
    CHECKPOINTING = "checkpointing"
    EXPORTING = "exporting"
    FINISHED = "finished"
    # of a publisher
    NOT_ASKED = "waiting for receivers"
    PREPARING_PAYLOAD = "encoding the payload"
    SENDING_WEIGHTS = "sending weights"
    # of a replica's slots
    WAITING_FOR_TASK_GROUPS = "waiting for task groups"
    WAITING_FOR_FIRST_WEIGHTS = "waiting for the first weights"
    DRAINING = "draining"
    RUNNING_WORKFLOW = "running the workflow"
    GENERATING = "generating"
    SCORING = "scoring"
    RUNNING_REWARD = "running the reward function"  # with the path of the function
    WAITING_FOR_GATEWAY = "waiting for"  # with the kind of call
    PAUSING_BEFORE_RETRY = "pausing before another attempt"
    WAITING_FOR_ROOM_TO_SEND = "waiting for room to send"
    # of a replica's records
    NOTHING_TO_SEND = "no records to send"
    WAITING_FOR_STREAM = "waiting for a new stream"
    WAITING_FOR_ACKNOWLEDGEMENTS = "waiting for acknowledgements"
    # of a replica's weights
    UP_TO_DATE = "up to date"
    FETCHING = "fetching a version"
    VERIFYING = "verifying and writing the mirror"
    CHANGING_WEIGHTS = "changing the engine's weights"
    # of the environment gateway
    WAITING_FOR_CALLS = "waiting for calls"
    PLAYING_EPISODES = "playing episodes"
    RUNNING_PROGRAMS = "running programs"
    JUDGING_PROGRAMS = "judging programs"
    COMPUTING_REWARDS = "computing rewards"
    # of the orchestrator
    RUN_ENDED = "the run has ended"
    WAITING_FOR_DISK = "waiting for free disk"
    WAITING_FOR_GATEWAY_TO_JOIN = "waiting for the environment gateway to join"
    WAITING_FOR_REPLICA = "waiting for a replica"
    WAITING_FOR_FIRST_VERSION = "waiting for the first version"
    WAITING_FOR_QUOTA = "waiting for room in the quota"
    WAITING_FOR_ROLLOUTS = "waiting for rollouts"
    NOTHING_TO_DO = "no work"

    def of(self, subject: str) -> ActivityLabel:
        """
        >>> ActivityName.RUNNING_REWARD.of("mine:score")
        'running the reward function mine:score'
        """
        return ActivityLabel(f"{self} {subject}")


AnyActivity = ActivityName | ActivityLabel


# --- Names of components in time accounts, stalls and metrics: built and recognised here only.


Component = NewType("Component", str)
NOBODY = Component("")  # waited for: an activity that is the component's own work
ORCHESTRATOR = Component("orchestrator")
GATEWAY = Component("envgateway")
GATEWAY_WORKERS = Component("envgateway/workers")
REDIS = Component("redis")
INFERENCE = Component("inference")  # all replicas, where none is named
PERSON = Component("person")  # a person has paused the run
DISK = Component("disk")
DATASET = Component("dataset")
WORKFLOW = Component("workflow")
ROLLOUTS = Component("rollouts")
_REPLICA, _TRAINER, _PUBLISHER, _ENGINE, _WEIGHTS = "replica/", "trainer/", "publisher/", "engine/", "weights/"
_RECORDS, _RANK = "records", "/rank"


def replica(replica_id: str) -> Component:
    return Component(f"{_REPLICA}{replica_id}")


def trainer_component(policy: str, rank: int = 0) -> Component:
    """
    >>> trainer("model0"), trainer("model0", 1)
    ('trainer/model0', 'trainer/model0/rank1')
    """
    return Component(f"{_TRAINER}{policy}" + (f"{_RANK}{rank}" if rank else ""))


def publisher(policy: str) -> Component:
    return Component(f"{_PUBLISHER}{policy}")


def engine(policy: str) -> Component:
    """The engine of a policy, as named by its replica; ``part`` makes the name unique in the run."""
    return Component(f"{_ENGINE}{policy}")


def weights(policy: str) -> Component:
    """The weights of a policy, as named by the replica that holds them; ``part`` makes the name unique in the run."""
    return Component(f"{_WEIGHTS}{policy}")


def part(owner: Component, inner: Component) -> Component:
    """
    >>> part(replica("a"), weights("model0"))
    'replica/a/weights/model0'
    """
    return Component(f"{owner}/{inner}")


def records(owner: Component) -> Component:
    """The records of a replica on their way to the orchestrator."""
    return Component(f"{owner}/{_RECORDS}")


def is_replica(component: str) -> bool:
    """Whether the component is a whole replica, not a part."""
    return is_of_replica(component) and component.count("/") == 1


def is_of_replica(component: str) -> bool:
    """Whether the component is a replica or a part of one."""
    return component.startswith(_REPLICA)


def replica_id(component: str) -> str:
    """The id of a replica, from its component."""
    return component.removeprefix(_REPLICA)


def is_of_trainer(component: str) -> bool:
    """Whether the component is any rank of a trainer."""
    return component.startswith(_TRAINER)


def is_publisher(component: str) -> bool:
    return component.startswith(_PUBLISHER)


def is_weights(component: str) -> bool:
    """Whether the component is the weights of a policy in a replica."""
    return f"/{_WEIGHTS}" in component


def is_records(component: str) -> bool:
    return component.endswith(f"/{_RECORDS}")


def split(component: str) -> tuple[Component, Component]:
    """The replica and the part of a component; the part is ``NOBODY`` for a whole component.

    >>> split("replica/a/weights/model0"), split("trainer/model0/rank1")
    (('replica/a', 'weights/model0'), ('trainer/model0/rank1', ''))
    """
    for inner in (_WEIGHTS, _ENGINE, _RECORDS):
        whole, between, rest = component.partition(f"/{inner}")
        if between and is_of_replica(whole):
            return Component(whole), Component(f"{inner}{rest}")
    return Component(component), NOBODY


class Activity(NamedTuple):
    """The activity of a lane; ``on`` is the component waited for, if any."""

    name: AnyActivity
    on: Component = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTime:
    """One activity of an account, now."""

    name: AnyActivity
    on: Component = NOBODY
    seconds: float = 0.0  # lane-seconds since the start
    num_now: int = 0  # lanes in it
    longest_now_s: float = 0.0  # of those that are in it
    num_done: int = 0  # ends since the start
    detail: str = ""  # of the one that is in it longest


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """An account at one moment."""

    component: Component
    num_lanes: int = 1
    activities: tuple[ActivityTime, ...] = ()
    progress: int = 0
    cpu_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Lanes x lifetime."""
        return sum([activity.seconds for activity in self.activities])

    def shares(self) -> dict[Activity, float]:
        """Of the lanes' time since the start; they sum to 1 unless no time has passed."""
        whole = self.seconds
        return {Activity(a.name, a.on): a.seconds / whole for a in self.activities} if whole > 0 else {}

    def named_shares(self) -> dict[str, float]:
        """By "activity" or "activity -> component waited for", largest first."""
        found = sorted(self.shares().items(), key=lambda item: -item[1])
        return {
            f"{activity.name} -> {activity.on}" if activity.on else activity.name: share for activity, share in found
        }

    def now(self) -> list[ActivityTime]:
        """The present activities, longest first."""
        return sorted((a for a in self.activities if a.num_now), key=lambda a: -a.longest_now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The state of a peer, as a dependent component knows it."""

    component: Component
    address: str = ""
    silent_s: float = 0.0  # since it last answered; 0 when it answered the last time
    detail: str = ""  # why it did not answer
    gauges: Mapping[str, float] = field(default_factory=dict)  # when it last answered
    accounts: tuple[AccountState, ...] = ()


@dataclass(slots=True, eq=False)
class Wait:
    """An activity of a lane: in the body of a ``with``, or below those. ``note`` adds a detail. Without a lane, no time is
    counted.

    A class, not a generator: a rollout enters half a dozen, and a generator costs three times as much.
    """

    activity: Activity
    lane: Lane | None = None
    detail: str = ""

    def __enter__(self) -> Wait:
        if self.lane is not None:
            account = self.lane.account
            with account.lock:
                account.settle(self.lane, account.clock())
                self.lane.entries.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self.lane is not None:
            account, entries = self.lane.account, self.lane.entries
            with account.lock:
                if entries[-1] is self:
                    account.settle(self.lane, account.clock())
                    entries.pop()
                elif self in entries:
                    entries.remove(self)
                else:  # the lane was released before this activity ended
                    return
                account.num_done[self.activity] += 1

    def note(self, detail: str) -> None:
        self.detail = detail


@dataclass(slots=True, eq=False)
class Lane:
    """One of the things that a component does at once. The last entry is the one that counts."""

    account: TimeAccount
    entries: list[Wait]
    since: float  # when the entry that counts began to, or began to again


_LANE: ContextVar[Lane | None] = ContextVar("lane", default=None)


class TimeAccount:
    def __init__(
        self,
        component: Component,
        *,
        num_lanes: int = 1,
        rest: Activity = Activity(ActivityName.IDLE),
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``rest`` is the activity of free lanes; ``cpu_s`` returns the processor seconds of the work."""
        self.component = component
        self.num_lanes = num_lanes
        self.clock = clock
        self._cpu_s = cpu_s
        self.lock = threading.Lock()
        self._rest = rest
        now = clock()
        self._lanes = [Lane(self, [Wait(rest)], now) for _ in range(num_lanes)]
        self._free = list(reversed(self._lanes)) if num_lanes > 1 else []
        self._seconds: defaultdict[Activity, float] = defaultdict(float)
        self.num_done: Counter[Activity] = Counter()
        self._progress = 0

    # -- activities of lanes ------------------------------------------------------------------------------------------

    @contextmanager
    def lane(self, name: AnyActivity, on: Component = NOBODY) -> Iterator[Lane | None]:
        """Occupy a free lane for this task; None, without counting, if all are occupied."""
        with self.lock:
            lane = self._free.pop() if self._free else None
        if lane is not None:
            Wait(Activity(name, on), lane).__enter__()
        token = _LANE.set(lane)
        try:
            yield lane
        finally:
            _LANE.reset(token)
            if lane is not None:
                with self.lock:
                    self.settle(lane, now := self.clock())
                    self.num_done.update([entry.activity for entry in lane.entries[1:]])
                    del lane.entries[1:]
                    self._replace(lane, self._rest, now)
                    self._free.append(lane)

    def during(self, name: AnyActivity, on: Component = NOBODY, lane: Lane | None = None) -> Wait:
        """In the body of this, the lane of this task, or the one that is given, is in this. A task without a lane counts
        only where the account has but one."""
        return Wait(Activity(name, on), lane or self.here())

    def here(self) -> Lane | None:
        """The lane of this task."""
        lane = _LANE.get()
        if lane is not None and lane.account is self:
            return lane
        return self._lanes[0] if self.num_lanes == 1 else None

    def enter(self, name: AnyActivity, on: Component = NOBODY, detail: str = "") -> None:
        """Set the base activity of the only lane, below those entered with ``during``. If unchanged, only the
        detail changes."""
        with self.lock:
            lane = self._lanes[0]
            self._replace(lane, Activity(name, on), self.clock())
            lane.entries[0].detail = detail

    def rest(self, name: AnyActivity, on: Component = NOBODY) -> None:
        """Set the activity of free lanes."""
        with self.lock:
            self._rest = Activity(name, on)
            now = self.clock()
            for lane in self._free:
                self._replace(lane, self._rest, now)

    def beat(self, num_done: int = 1) -> None:
        """Pieces of work were done."""
        self._progress += num_done  # by one thread; a lock would be felt in a decoding step

    def set_progress(self, progress: int) -> None:
        """Set the pieces of work since the start, where another object counts them already."""
        self._progress = progress

    # -- reports -----------------------------------------------------------------------------------------------------

    def state(self) -> AccountState:
        """The account now."""
        with self.lock:
            now = self.clock()
            current: defaultdict[Activity, list[tuple[float, str]]] = defaultdict(list)
            for lane in self._lanes:
                entry = lane.entries[-1]
                current[entry.activity].append((now - lane.since, entry.detail))
            activities = []
            for activity in dict.fromkeys([*self._seconds, *self.num_done, *current]):
                lanes = current.get(activity, [])
                longest_s, detail = max(lanes, default=(0.0, ""))
                activities.append(
                    ActivityTime(
                        name=ActivityLabel(str(activity.name)),  # plain: orjson takes no enum as the key of an object
                        on=activity.on,
                        seconds=self._seconds.get(activity, 0.0) + sum(seconds for seconds, _ in lanes),
                        num_now=len(lanes),
                        longest_now_s=longest_s,
                        num_done=self.num_done[activity],
                        detail=detail,
                    )
                )
            return AccountState(
                component=self.component,
                num_lanes=self.num_lanes,
                activities=tuple(activities),
                progress=self._progress,
                cpu_s=self._cpu_s(),
            )

    # -- bookkeeping, under the lock ---------------------------------------------------------------------------------

    def _replace(self, lane: Lane, activity: Activity, now: float) -> None:
        """The lowest entry becomes another one."""
        lowest = lane.entries[0]
        if lowest.activity == activity:
            return
        if len(lane.entries) == 1:
            self.settle(lane, now)
        self.num_done[lowest.activity] += 1
        lane.entries[0] = Wait(activity)

    def settle(self, lane: Lane, now: float) -> None:
        """Book the time since the last change on the counting activity."""
        self._seconds[lane.entries[-1].activity] += now - lane.since
        lane.since = now


def during_here(name: AnyActivity, on: Component = NOBODY) -> Wait:
    """Like ``during`` of the account with this task's lane; without a lane, no time is counted."""
    return Wait(Activity(name, on), _LANE.get())

"""Names of activities and waits, which time accounts report and the stall detector reads.

Producers and readers use members of these enums, so renaming a member on one side only fails to type-check.
"""

from __future__ import annotations

import enum
from typing import NewType

ActivityLabel = NewType("ActivityLabel", str)
"""An activity with a subject, such as the path of a reward function, or one that another process has reported."""


class ActivityName(enum.StrEnum):
    # of every component
    IDLE = "idle"
    STARTING = "starting"
    PAUSED = "paused"
    # of a trainer's ranks
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


class TrainerState(enum.StrEnum):
    """State of a trainer's rank, reported every two seconds; each has the name of an activity of its time account."""

    STARTING = "starting"
    REPLAYING = "replaying"
    WAITING_FOR_BATCH = "waiting_for_batch"
    PAUSED = "paused"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EXPORTING = "exporting"
    FINISHED = "finished"

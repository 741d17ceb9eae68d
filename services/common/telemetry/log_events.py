"""Names of log events that tools read. Other events are for people only and are plain strings where they are logged."""

from __future__ import annotations

import enum


class LogEvent(enum.StrEnum):
    RECORD_DROPPED = "record.dropped"  # outcome, task_group, index, replica
    TASK_GROUP_ORPHANED = "task_group.orphaned"  # task_group, open_slots
    TASK_GROUP_GIVEN_UP = "task_group.given_up"  # task_group, reason
    TASK_GROUP_CANCELLED = "task_group.cancelled"  # task_group, reason
    ROLLOUT_RETRY = "rollout.retry"  # task_group, index, error
    ROLLOUT_CRASHED = "rollout.crashed"  # task_group, index
    ROLLOUT_LOST = "rollout.lost"  # task_group, index
    LEASE_LOST = "replica.lease_lost"  # replica
    REPLICA_REPLACED = "replica.replaced"  # replica, incarnation, by
    RUN_RECOVERED = "run.recovered"
    SNAPSHOT_ORPHAN_REMOVED = "snapshot.orphan_removed"  # path
    BATCH_PULLED = "batch.pulled"  # policy, step, rank
    # Tests and benchmarks that watch several processes read these:
    CHECKPOINT_DAMAGED = "checkpoint.damaged"
    CHECKPOINT_LOADED = "checkpoint.loaded"
    STEP_REPLAYED = "step.replayed"
    VERSION_DIFFERS = "version.differs_after_replay"
    RECORD_SET_ASIDE = "journal.set_aside"
    REPLICA_JOINED = "replica.joined"
    ENGINE_UPDATED = "engine.updated"
    WEIGHTS_UPDATED = "weights.updated"
    TRANSPORT_FAILED = "weights.transport_failed"
    WEIGHTS_GAVE_UP_DELTA = "weights.gave_up_delta"  # policy, version: the snapshot is fetched instead
    WEIGHTS_KEPT_OLD = "weights.kept_old"
    RUN_ENDED = "run.ended"
    RUN_UNSTALLED = "run.unstalled"
    RPC_FAILED = "rpc.failed"
    SERVER_READY = "server.ready"
    SERVER_LISTENING = "server.listening"
    WORKER_READY = "worker.ready"
    LOOP_BLOCKED = "watchdog.loop_blocked"
    THREAD_STUCK = "watchdog.thread_stuck"
    TRAJECTORIES_REFUSED = "trajectories.refused"
    ROLLOUT_FAILED = "rollout.failed"

"""Causes of stalls, with the advice for each. One word each, for logs, tests and docs."""

from __future__ import annotations

import enum

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
    RECORDS_REFUSED = "records_refused"
    NOTHING_TO_PLAY = "nothing_to_play"
    QUOTA_FULL = "quota_full"
    NO_PROGRESS = "no_progress"


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
    Cause.ALL_FAIL: "fix the cause in the failures, then run `millrace resume` if the run was paused",
    Cause.MASKED: "fix the named causes, or raise rollout.max_masked_share, then run `millrace resume`",
    Cause.RECORDS_REFUSED: "fix the named reason at that replica (model, tokenizer, settings, workflow or reward), or remove the "
    "replica: `millrace drain`; its rollouts are lost meanwhile (docs/protocol.md has the bounds)",
    Cause.NOTHING_TO_PLAY: "data.curation refuses the whole dataset: loosen its limits, or add tasks",
    Cause.QUOTA_FULL: "outstanding sequences fill the quota without a full batch: raise batch.max_staleness or lower "
    "batch.size",
    Cause.NO_PROGRESS: "look at the log of the component at the end of the chain",
}

"""Every cause that a stall can have, with what to do about it. One word each, for logs, tests and docs."""

from __future__ import annotations

import enum


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
    RECORDS_REFUSED = "records_refused"
    NOTHING_TO_PLAY = "nothing_to_play"
    QUOTA_FULL = "quota_full"
    NO_PROGRESS = "no_progress"


ADVICE = {
    Cause.SILENT: "look whether its process and machine still run and reach us (a stopped or frozen process, a cut or "
    "half-open connection); its log tells where it hangs if its event loop is blocked (watchdog.loop_blocked)",
    Cause.LOST: "start it again; it resumes by itself",
    Cause.ABSENT: "start it, or look in its log why it does not come up",
    Cause.STUCK: "its log tells the stack of a thread that hangs (watchdog.thread_stuck); kill -9 it: whoever supervises "
    "it starts it again, and nothing acknowledged is lost",
    Cause.FROZEN: "kill -9 the replica: the engine no longer computes, and only a new process helps",
    Cause.NO_FREE_DISK: "free some disk where the run directory lies; the run goes on by itself",
    Cause.JOURNAL_STUCK: "look at the file system of the run directory (a network mount that hangs?)",
    Cause.STOOD_STILL: "look at the machine: the orchestrator's process was stopped or starved; leases were prolonged",
    Cause.CLOCK_JUMPED: "let a time service slew the clock instead of setting it; timestamps of this run jump",
    Cause.ORDER_LOST: "nothing to do if it goes away: the order is sent again; else look at the network in between",
    Cause.NOT_ACKNOWLEDGED: "look at the link between them: records leave faster than they arrive",
    Cause.WEIGHTS_NOT_ARRIVING: "look at the link to the publisher and at weights.kept_old in the replica's log",
    Cause.UNREACHABLE: "start it, or look at the network in between; jobs are kept and sent again",
    Cause.NO_WORKERS: "start workers: python -m services.envgateway.worker",
    Cause.EXHAUSTED: "raise envgateway.sandbox.num_slots, or lower the limits of the programs that fill it",
    Cause.ALL_FILTERED: "all rewards of a group are equal, so nothing can be learnt: use easier or harder tasks, a finer "
    "reward, or batch.dynamic_sampling: false",
    Cause.ALL_FAIL: "mend what the failures say, then `millrace resume` if the run was paused",
    Cause.RECORDS_REFUSED: "mend what the reason names at that replica (model, tokenizer, settings, workflow or reward), "
    "or drain it: `millrace drain`; what it plays is lost meanwhile (docs/protocol.md has the bounds)",
    Cause.NOTHING_TO_PLAY: "data.curation leaves nothing of the dataset: loosen it, or add tasks",
    Cause.QUOTA_FULL: "what is outstanding fills the quota and makes no batch: raise batch.max_staleness or lower "
    "batch.size",
    Cause.NO_PROGRESS: "look at the log of the component at the end of the chain",
}

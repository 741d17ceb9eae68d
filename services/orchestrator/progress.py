"""Progress of the run as one record for people and tools, the waits between components, and gauges with their names as
metrics. Changes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

from services.common import wire
from services.common.checkpoints import CheckpointGauge
from services.common.config.data import is_training
from services.common.pb import account_pb2, run_pb2
from services.common.prometheus import Metric
from services.common.records import FAILURES_PREFIX, RunCount, by_name
from services.common.telemetry.metrics import RunSummary, StepKey
from services.common.wire import timestamp_to_proto, write
from services.orchestrator.journal.entries import DatasetScore, EvaluationResult
from services.orchestrator.metrics import evaluation_values
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.tasks.rows import UsableRows

wire.RENAMED[EvaluationResult] = {"elapsed_s": ""}
wire.RENAMED[DatasetScore] = {"items": "", "item_rewards": ""}


def progress(core: OrchestratorCore) -> run_pb2.RunProgress:
    """The run at this moment."""
    disk, threshold = core.disk.outlook, core.threshold
    wall_s = time.time() - core.clock()
    checkpoints = {gauge.value: sum(int(t.gauges.get(gauge, 0)) for t in core.trainers) for gauge in CheckpointGauge}
    return run_pb2.RunProgress(
        at=timestamp_to_proto(time.time()),
        state=run_pb2.RunState.Value(f"RUN_STATE_{core.control.state.name}"),
        policies=[_policy(core, policy) for policy in core.batches],
        replicas=[
            run_pb2.ReplicaProgress(
                replica_id=replica.replica_id,
                num_slots=replica.num_slots,
                num_running=replica.num_running,
                tokens_per_s=replica.tokens_per_s,
                versions={policy: held.number for policy, held in replica.held.items()},
                lease_left_s=max(0.0, replica.lease_until - core.clock()),
                draining=replica.draining,
            )
            for replica in core.pool
        ],
        tokens_per_s=core.pool.tokens_per_s,
        evaluations=[evaluation_to_proto(result) for result in core.evaluations.results.values()],
        counters={**core.counters, **{name: count for name, count in checkpoints.items() if count}},
        waits=waits(core),
        started_at=timestamp_to_proto(core.started_at),
        stalls=[
            run_pb2.Stall(
                component=stall.component,
                cause=stall.cause.value,
                detail=stall.detail,
                since=timestamp_to_proto(wall_s + stall.since),
                advice=stall.cause.advice,
            )
            for stall in core.stalls
        ],
        accounts=[write(account, account_pb2.TimeAccount()) for account in core.book.totals()],
        disk=None if disk is None else run_pb2.DiskOutlook(**by_name(disk)),
        set_aside=[
            run_pb2.SetAsideRecords(kind=kind, reason=reason.value, count=count)
            for (kind, reason), count in sorted(core.aside.counts().items())
        ],
        threshold=None if threshold is None else run_pb2.Threshold(**by_name(threshold.state())),
    )


def _policy(core: OrchestratorCore, policy: str) -> run_pb2.PolicyProgress:
    trainer, account = core.trainers.get(policy), core.experience.admission.accounts[policy]
    metrics = core.last_metrics[policy]
    return run_pb2.PolicyProgress(
        policy=policy,
        version=core.ledgers[policy].newest_number,
        num_steps=core.last_step(policy),
        num_buffered=core.experience.buffers[policy].num_sequences,
        num_expected=round(account.expected),
        reward_mean=metrics.get(StepKey.ROLLOUT_REWARD_MEAN, 0.0),
        staleness_max=int(metrics.get(StepKey.STALENESS_MAX, 0)),
        trainer_state=trainer.state if trainer is not None else "absent",
        metrics=metrics,
        quota=account.quota,
    )


def evaluation_to_proto(result: EvaluationResult) -> run_pb2.EvaluationResult:
    return write(result, run_pb2.EvaluationResult())


def summary(core: OrchestratorCore) -> RunSummary:
    """The contents of ``summary.json``."""
    ledgers, until = core.trained_ledgers, core.threshold
    return {
        "run_id": core.run_id,
        "state": core.control.phase.value,
        "steps": {policy: max(ledger.newest_number, 0) for policy, ledger in ledgers.items()},
        "evaluations": {result.name: evaluation_values(result) for result in core.evaluations.results.values()},
        "until": None if until is None else asdict(until.state()),
        "overlap_share": core.timeline.overlap_share,
        "max_staleness": max((batches.staleness_max for batches in core.batches.values()), default=0),
        "seconds": time.time() - core.started_at,
        "counters": dict(core.counters),
        "time": core.book.summary(),
        "waited_for": core.book.waits(),
    }


def waits(core: OrchestratorCore) -> list[str]:
    """The waits between components, for people."""
    found: list[str] = []
    if core.journal.blocked:
        found.append(f"journal waits for free disk: {core.journal.blocked}")
    for policy, ledger in core.ledgers.items():
        batches = core.batches.get(policy)
        if batches is None:
            if ledger.newest is None:
                found.append(f"run waits for a replica that serves {policy}")
            continue
        if (
            core.trainers.get(policy) is None
            and not core.control.ended
            and ledger.newest_number < core.last_step(policy)
        ):
            found.append(f"run waits: no trainer of {policy} has joined")
        elif ledger.lacks_newest:
            found.append(f"run waits for the trainer of {policy} to offer version {ledger.newest_number} again")
        elif ledger.newest is None:
            found.append(f"run waits for the first version of {policy}")
        if ledger.offered_otherwise and not core.control.ended:
            found.append(
                f"version {ledger.newest_number} of {policy} cannot be fetched: its trainer replayed the batch to other bits (not "
                "deterministic). Replicas that hold a version that is new enough play on until the next; without any, stop the run "
                "and begin another one from its newest checkpoint (rollmill export RUN, then policies.<name>.model.path)"
            )
        if core.reached_threshold:
            continue
        buffer = core.experience.buffers[policy]
        if batches.num_waiting and (num_due := batches.late.num_waited_for):
            found.append(f"trainer {policy} waits for task groups that are due: {num_due}")
        elif batches.num_waiting:
            have, need = buffer.num_sequences, buffer.batch_size
            lacks = buffer.lacks
            wanted = f"task groups of source {lacks}" if lacks else f"sequences: {have} of {need}"
            found.append(f"trainer {policy} waits for {wanted}")
        for source, count in core.experience.mixtures[policy].exhausted.items():
            found.append(
                f"batches of {policy} do without source {source}: its last {count} task groups gave nothing to train"
            )
    found += [current.standing() for current in core.evaluations.passes.values()]
    if core.dispatcher.waits_for:
        found.append(f"dispatcher waits: {core.dispatcher.waits_for}")
    return found


# --- gauges ----------------------------------------------------------------------------------------------------------

METRICS = (
    Metric("rollmill_tasks", "gauge", "Tasks to train on.", "tasks"),
    Metric("rollmill_tasks_too_long", "gauge", "Tasks of a dataset left out because their prompts are too long.", "tasks_too_long/{dataset}"),
    Metric("rollmill_rows_left_out", "gauge", "Rows of a dataset that cannot be used, and are left out.", "rows_left_out/{dataset}"),
    Metric("rollmill_planned_steps", "gauge", "Training steps of each policy in this run.", "steps"),
    Metric("rollmill_replicas", "gauge", "Replicas in the pool.", "replicas"),
    Metric("rollmill_running_rollouts", "gauge", "Slots of task groups that are with a replica.", "running"),
    Metric("rollmill_tokens_per_second", "gauge", "Tokens sampled per second over the last seconds, all replicas.", "tokens_per_s"),
    Metric("rollmill_waits", "gauge", "Waits of the run, as `rollmill status` names them.", "waits"),
    Metric("rollmill_journal_records_total", "counter", "Records made durable since the process started.", "journal_records"),
    Metric("rollmill_journal_commits_total", "counter", "Commits of the journal since the process started.", "journal_commits"),
    Metric("rollmill_journal_blocked", "gauge", "1 while the journal waits for free disk.", "journal_blocked"),
    Metric("rollmill_journal_records_set_aside_total", "counter", "Records of the journal that are not used: damaged, unreadable, refused, orphaned.", "set_aside/{kind}/{reason}"),
    Metric("rollmill_disk_free_bytes", "gauge", "Free bytes where the run's directory lies.", "disk_free_bytes"),
    Metric("rollmill_run_directory_bytes", "gauge", "Bytes of the run's directory.", "run_bytes"),
    Metric("rollmill_disk_full_seconds", "gauge", "Seconds until orchestrator.min_free_bytes is reached at the growth of the last half hour; absent while it does not fill.", "disk_full_in_s"),
    Metric("rollmill_overlap_ratio", "gauge", "Share of trainers' compute time in which some replica emitted tokens.", "overlap_share"),
    Metric("rollmill_stalled_seconds", "gauge", "Seconds since the begin of a component's stall, by cause.", "stall/{cause}/{component}"),
    Metric("rollmill_weight_version", "gauge", "The ledger's newest version; -1 before the first.", "version/{policy}"),
    Metric("rollmill_buffered_sequences", "gauge", "Sequences that wait for a batch.", "buffered/{policy}"),
    Metric("rollmill_expected_sequences", "gauge", "Sequences expected of task groups that are played.", "expected/{policy}"),
    Metric("rollmill_accepted_sequences", "gauge", "Sequences that are finished and not yet trained.", "accepted/{policy}"),
    Metric("rollmill_unfinished_sequences", "gauge", "Accepted sequences that wait for a running sibling.", "unfinished/{policy}"),
    Metric("rollmill_quota_sequences", "gauge", "Sequences that the staleness quota allows for.", "quota/{policy}"),
    Metric("rollmill_staleness_max_versions", "gauge", "Largest staleness that was ever put into a batch.", "staleness_max/{policy}"),
    Metric("rollmill_waiting_ranks", "gauge", "Ranks of the trainer that wait for a batch.", "waiting_ranks/{policy}"),
    Metric("rollmill_step_metric", "gauge", "A metric of the newest training step, by its name in metrics/orchestrator.jsonl.", "step/{policy}/{metric}"),
    Metric("rollmill_evaluation_reward", "gauge", "Mean reward of a finished evaluation.", "evaluation/{evaluation}"),
    Metric("rollmill_replica_slots", "gauge", "Rollouts that a replica plays at once.", "replica_slots/{replica}"),
    Metric("rollmill_replica_running_rollouts", "gauge", "Slots of task groups that are with a replica.", "replica_running/{replica}"),
    Metric("rollmill_replica_tokens_per_second", "gauge", "Tokens that a replica sampled per second over the last seconds.", "replica_tokens_per_s/{replica}"),
    Metric("rollmill_replica_lease_seconds", "gauge", "Seconds until a replica's lease runs out.", "replica_lease_left_s/{replica}"),
    Metric("rollmill_rollout_failures_total", "counter", "Slots that ended in a failure.", f"counter/{FAILURES_PREFIX}{{reason}}"),
    Metric("rollmill_records_dropped_total", "counter", "Records that were repeated, unknown, beyond a bound or from an unknown sender.", "counter/records_{outcome}"),
    Metric("rollmill_records_refused_total", "counter", "Records that were not taken, by the bound or rule that they break.", "counter/refused_{reason}"),
    Metric("rollmill_masked_samples_total", "counter", "Training rollouts without a reward, by cause.", "counter/masked/{policy}/{cause}"),
    Metric("rollmill_redrawn_samples_total", "counter", "Training rollouts that were repeated, by cause.", "counter/redrawn/{policy}/{cause}"),
    Metric("rollmill_masked_share", "gauge", "Share of a policy's newest rollouts that machinery left without a reward.", "masked_share/{policy}"),
    Metric("rollmill_sequences_replayed_total", "counter", "Sequences that were trained again.", f"counter/{RunCount.SEQUENCES_REPLAYED}"),
    Metric("rollmill_sequences_dropped_total", "counter", "Sequences that were not trained: filtered, surplus, expired.", "counter/sequences_{reason}"),
    Metric("rollmill_task_groups_total", "counter", "Task groups that were issued, cancelled, overdue.", "counter/task_groups_{event}"),
    Metric("rollmill_slots_reissued_total", "counter", "Slots issued again after their replica was lost.", f"counter/{RunCount.SLOTS_REISSUED}"),
    Metric("rollmill_leases_lost_total", "counter", "Replicas and trainers that did not report for a lease.", "counter/{peer}_leases_lost"),
    Metric("rollmill_events_total", "counter", "All other counters of the run.", "counter/{event}"),
)  # fmt: skip


def gauges(
    core: OrchestratorCore, sources: Mapping[str, UsableRows], counted_before: Mapping[str, int]
) -> dict[str, float]:
    """``sources``: the run's tasks by their dataset's section. ``counted_before``: the run's counters at the start of
    this process.

    Counters are relative to that start: a restart may lose counts of the last seconds, and a monitor would read a
    decrease as a reset.
    """
    now, disk = core.clock(), core.disk.outlook
    on_disk = {}
    if disk is not None:
        on_disk = {"disk_free_bytes": disk.free_bytes, "run_bytes": disk.run_bytes, "disk_full_in_s": disk.full_in_s}
    return {
        **{name: float(value) for name, value in on_disk.items() if value is not None},
        "tasks": float(sum(len(source) for where, source in sources.items() if is_training(where))),
        **{f"tasks_too_long/{where}": float(source.num_too_long) for where, source in sources.items()},
        **{f"rows_left_out/{where}": float(source.left_out.count) for where, source in sources.items()},
        "steps": float(core.num_steps),
        "replicas": float(len(core.pool)),
        "running": float(core.pool.num_running),
        "tokens_per_s": core.pool.tokens_per_s,
        "waits": float(len(waits(core))),
        "journal_records": float(core.journal.num_records),
        "journal_commits": float(core.journal.num_commits),
        "journal_blocked": float(bool(core.journal.blocked)),
        **{f"set_aside/{kind}/{why.value}": float(count) for (kind, why), count in core.aside.counts().items()},
        "overlap_share": core.timeline.overlap_share,
        **{f"stall/{stall.cause.value}/{stall.component}": now - stall.since for stall in core.stalls},
        **_policy_gauges(core),
        **_replica_gauges(core),
        **{f"counter/{name}": float(count - counted_before.get(name, 0)) for name, count in core.counters.items()},
        **{
            f"evaluation/{r.name}": r.mean_reward
            for r in core.evaluations.results.values()
            if r.mean_reward is not None
        },
    }


def _policy_gauges(core: OrchestratorCore) -> dict[str, float]:
    found: dict[str, float] = {}
    for policy, batches in core.batches.items():
        account = core.experience.admission.accounts[policy]
        found |= {
            f"version/{policy}": float(core.ledgers[policy].newest_number),
            f"buffered/{policy}": float(core.experience.buffers[policy].num_sequences),
            f"expected/{policy}": float(account.expected),
            f"accepted/{policy}": float(account.accepted),
            f"unfinished/{policy}": float(account.unfinished),
            f"quota/{policy}": float(account.quota),
            f"staleness_max/{policy}": float(batches.staleness_max),
            f"waiting_ranks/{policy}": float(batches.num_waiting),
            f"masked_share/{policy}": core.masked.share(policy),
        }
        metrics = core.last_metrics[policy].items()
        found |= {f"step/{policy}/{name}": float(value) for name, value in metrics if math.isfinite(value)}
    return found


def _replica_gauges(core: OrchestratorCore) -> dict[str, float]:
    now = core.clock()
    found: dict[str, float] = {}
    for replica in core.pool:
        found |= {
            f"replica_slots/{replica.replica_id}": float(replica.num_slots),
            f"replica_running/{replica.replica_id}": float(replica.num_running),
            f"replica_tokens_per_s/{replica.replica_id}": replica.tokens_per_s,
            f"replica_lease_left_s/{replica.replica_id}": max(0.0, replica.lease_until - now),
        }
    return found

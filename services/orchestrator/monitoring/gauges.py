"""Gauges of the orchestrator for ``GetStatus``, and their names as metrics. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.common.config.data import is_training
from services.common.prometheus.metric import Metric
from services.common.records.fates import FAILURES_PREFIX, RunCount
from services.orchestrator.monitoring.progress import waits
from services.orchestrator.monitoring.views import ProgressView
from services.orchestrator.state.disk_forecast import DiskOutlook
from services.orchestrator.tasks.datasets import TaskSource
from services.orchestrator.tasks.prompt_length import ShortPrompts

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
    view: ProgressView, sources: Mapping[str, TaskSource], counted_before: Mapping[str, int]
) -> dict[str, float]:
    """``sources``: the run's tasks by their dataset's section. ``counted_before``: the run's counters at the start of
    this process.

    Counters are relative to that start: a restart may lose counts of the last seconds, and a monitor would read a
    decrease as a reset.
    """
    now = view.clock()
    return {
        "tasks": float(sum(len(source) for where, source in sources.items() if is_training(where))),
        **{f"tasks_too_long/{where}": float(_too_long(source)) for where, source in sources.items()},
        **{f"rows_left_out/{where}": float(source.left_out.count) for where, source in sources.items()},
        "steps": float(view.versions.num_steps),
        "replicas": float(len(view.pool)),
        "running": float(view.pool.num_running),
        "tokens_per_s": view.pool.tokens_per_s,
        "waits": float(len(waits(view))),
        "journal_records": float(view.journal.num_records),
        "journal_commits": float(view.journal.num_commits),
        "journal_blocked": float(bool(view.journal.blocked)),
        **{f"set_aside/{kind}/{why.value}": float(count) for (kind, why), count in view.aside.counts().items()},
        **_disk(view.disk.outlook),
        "overlap_share": view.timeline.overlap_share,
        **{f"stall/{stall.cause.value}/{stall.component}": now - stall.since for stall in view.stall_state.stalls},
        **_policies(view),
        **_replicas(view),
        **{f"counter/{name}": float(count - counted_before.get(name, 0)) for name, count in view.counters.items()},
        **{
            f"evaluation/{r.name}": r.mean_reward
            for r in view.evaluations.results.values()
            if r.mean_reward is not None
        },
    }


def _disk(disk: DiskOutlook | None) -> dict[str, float]:
    if disk is None:
        return {}
    known = {"disk_free_bytes": float(disk.free_bytes), "run_bytes": float(disk.run_bytes)}
    return known if disk.full_in_s is None else {**known, "disk_full_in_s": disk.full_in_s}


def _too_long(source: TaskSource) -> int:
    return source.num_too_long if isinstance(source, ShortPrompts) else 0


def _policies(view: ProgressView) -> dict[str, float]:
    found: dict[str, float] = {}
    for policy, trained in view.policies.items():
        account = trained.account
        found |= {
            f"version/{policy}": float(trained.ledger.newest_number),
            f"buffered/{policy}": float(trained.num_buffered),
            f"expected/{policy}": float(account.expected),
            f"accepted/{policy}": float(account.accepted),
            f"unfinished/{policy}": float(account.unfinished),
            f"quota/{policy}": float(account.quota),
            f"staleness_max/{policy}": float(trained.batches.staleness_max),
            f"waiting_ranks/{policy}": float(trained.batches.num_waiting),
            f"masked_share/{policy}": view.masked.share(policy),
        }
        metrics = view.versions.last_metrics[policy].items()
        found |= {f"step/{policy}/{name}": float(value) for name, value in metrics if math.isfinite(value)}
    return found


def _replicas(view: ProgressView) -> dict[str, float]:
    now = view.clock()
    found: dict[str, float] = {}
    for replica in view.pool:
        found |= {
            f"replica_slots/{replica.replica_id}": float(replica.num_slots),
            f"replica_running/{replica.replica_id}": float(replica.num_running),
            f"replica_tokens_per_s/{replica.replica_id}": replica.tokens_per_s,
            f"replica_lease_left_s/{replica.replica_id}": max(0.0, replica.lease_until - now),
        }
    return found

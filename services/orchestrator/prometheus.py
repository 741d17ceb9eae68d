"""The orchestrator's metrics: its gauges under the names of the field."""

from __future__ import annotations

from services.common.prometheus.metric import Metric

METRICS = (
    Metric("millrace_tasks", "gauge", "Tasks to train on.", "tasks"),
    Metric("millrace_tasks_too_long", "gauge", "Tasks of a dataset left out because their prompts are too long.", "tasks_too_long/{dataset}"),
    Metric("millrace_rows_left_out", "gauge", "Rows of a dataset that cannot be used, and are left out.", "rows_left_out/{dataset}"),
    Metric("millrace_planned_steps", "gauge", "Training steps of each policy in this run.", "steps"),
    Metric("millrace_replicas", "gauge", "Replicas in the pool.", "replicas"),
    Metric("millrace_running_rollouts", "gauge", "Slots of task groups that are with a replica.", "running"),
    Metric("millrace_tokens_per_second", "gauge", "Tokens sampled per second over the last seconds, all replicas.", "tokens_per_s"),
    Metric("millrace_waits", "gauge", "Waits of the run, as `millrace status` names them.", "waits"),
    Metric("millrace_journal_records_total", "counter", "Records made durable since the process started.", "journal_records"),
    Metric("millrace_journal_commits_total", "counter", "Commits of the journal since the process started.", "journal_commits"),
    Metric("millrace_journal_blocked", "gauge", "1 while the journal waits for free disk.", "journal_blocked"),
    Metric("millrace_overlap_ratio", "gauge", "Share of trainers' compute time in which some replica emitted tokens.", "overlap_share"),
    Metric("millrace_stalled_seconds", "gauge", "How long a component stands still, by cause.", "stall/{cause}/{component}"),
    Metric("millrace_weight_version", "gauge", "The ledger's newest version; -1 before the first.", "version/{policy}"),
    Metric("millrace_buffered_sequences", "gauge", "Sequences that wait for a batch.", "buffered/{policy}"),
    Metric("millrace_expected_sequences", "gauge", "Sequences expected of task groups that are played.", "expected/{policy}"),
    Metric("millrace_accepted_sequences", "gauge", "Sequences that are finished and not yet trained.", "accepted/{policy}"),
    Metric("millrace_unfinished_sequences", "gauge", "Accepted sequences that wait for a running sibling.", "unfinished/{policy}"),
    Metric("millrace_quota_sequences", "gauge", "Sequences that the staleness quota allows for.", "quota/{policy}"),
    Metric("millrace_staleness_max_versions", "gauge", "Largest staleness that was ever put into a batch.", "staleness_max/{policy}"),
    Metric("millrace_waiting_ranks", "gauge", "Ranks of the trainer that wait for a batch.", "waiting_ranks/{policy}"),
    Metric("millrace_step_metric", "gauge", "A metric of the newest training step, by its name in metrics/orchestrator.jsonl.", "step/{policy}/{metric}"),
    Metric("millrace_evaluation_reward", "gauge", "Mean reward of a finished evaluation.", "evaluation/{evaluation}"),
    Metric("millrace_replica_slots", "gauge", "Rollouts that a replica plays at once.", "replica_slots/{replica}"),
    Metric("millrace_replica_running_rollouts", "gauge", "Slots of task groups that are with a replica.", "replica_running/{replica}"),
    Metric("millrace_replica_tokens_per_second", "gauge", "Tokens that a replica sampled per second over the last seconds.", "replica_tokens_per_s/{replica}"),
    Metric("millrace_replica_lease_seconds", "gauge", "Seconds until a replica's lease runs out.", "replica_lease_left_s/{replica}"),
    Metric("millrace_rollout_failures_total", "counter", "Slots that ended in a failure.", "counter/failures_{reason}"),
    Metric("millrace_records_dropped_total", "counter", "Records that were repeated, unknown, beyond a bound or from a stranger.", "counter/records_{outcome}"),
    Metric("millrace_records_refused_total", "counter", "Records that were not taken, by the bound or rule that they break.", "counter/refused_{reason}"),
    Metric("millrace_sequences_replayed_total", "counter", "Sequences that were trained again.", "counter/sequences_replayed"),
    Metric("millrace_sequences_dropped_total", "counter", "Sequences that were not trained: filtered, surplus, expired.", "counter/sequences_{reason}"),
    Metric("millrace_task_groups_total", "counter", "Task groups that were issued, cancelled, overdue.", "counter/task_groups_{event}"),
    Metric("millrace_slots_reissued_total", "counter", "Slots issued again after their replica was lost.", "counter/slots_reissued"),
    Metric("millrace_leases_lost_total", "counter", "Replicas and trainers that did not report for a lease.", "counter/{peer}_leases_lost"),
    Metric("millrace_events_total", "counter", "Everything else that the run counts.", "counter/{event}"),
)  # fmt: skip

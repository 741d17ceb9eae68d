"""Gauges of the orchestrator for ``GetStatus`` and metrics. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.common.config.data import is_training
from services.orchestrator.monitoring.progress import waits
from services.orchestrator.monitoring.views import ProgressView
from services.orchestrator.state.disk_forecast import DiskOutlook
from services.orchestrator.tasks.datasets import TaskSource
from services.orchestrator.tasks.prompt_length import ShortPrompts


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
        **{f"evaluation/{r.name}": r.mean_reward for r in view.evaluations.results.values()},
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

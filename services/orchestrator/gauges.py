"""Numbers of the orchestrator for ``GetStatus`` and metrics. Reads the ring, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.common.config.data import TRAIN
from services.orchestrator.datasets import TaskSource
from services.orchestrator.forecast import DiskOutlook
from services.orchestrator.progress import waits
from services.orchestrator.prompt_length import ShortPrompts
from services.orchestrator.ring import Ring


def gauges(ring: Ring, sources: Mapping[str, TaskSource], counted_before: Mapping[str, int]) -> dict[str, float]:
    """``sources``: the run's tasks by their dataset's section. ``counted_before``: the run's counters when this process began.

    Counters are told since then: what an earlier process counted in its last seconds may be lost, and one that goes back a
    little would be read as one that began anew.
    """
    now = ring.clock()
    return {
        "tasks": float(len(sources[TRAIN])),
        **{f"tasks_too_long/{where}": float(_too_long(source)) for where, source in sources.items()},
        **{f"rows_left_out/{where}": float(source.left_out.count) for where, source in sources.items()},
        "steps": float(ring.num_steps),
        "replicas": float(len(ring.pool)),
        "running": float(ring.pool.num_running),
        "tokens_per_s": ring.pool.tokens_per_s,
        "waits": float(len(waits(ring))),
        "journal_records": float(ring.journal.num_records),
        "journal_commits": float(ring.journal.num_commits),
        "journal_blocked": float(bool(ring.journal.blocked)),
        **{f"set_aside/{kind}/{why.value}": float(count) for (kind, why), count in ring.aside.counts().items()},
        **_disk(ring.disk),
        "overlap_share": ring.timeline.overlap_share,
        **{f"stall/{stall.cause.value}/{stall.component}": now - stall.since for stall in ring.standing.stalls},
        **_policies(ring),
        **_replicas(ring),
        **{f"counter/{name}": float(count - counted_before.get(name, 0)) for name, count in ring.counters.items()},
        **{f"evaluation/{r.name}": r.mean_reward for r in ring.evaluations.results.values()},
    }


def _disk(disk: DiskOutlook | None) -> dict[str, float]:
    if disk is None:
        return {}
    known = {"disk_free_bytes": float(disk.free_bytes), "run_bytes": float(disk.run_bytes)}
    return known if disk.full_in_s is None else {**known, "disk_full_in_s": disk.full_in_s}


def _too_long(source: TaskSource) -> int:
    return source.num_too_long if isinstance(source, ShortPrompts) else 0


def _policies(ring: Ring) -> dict[str, float]:
    found: dict[str, float] = {}
    for policy, ledger in ring.trained_ledgers.items():
        account, batches = ring.experience.admission.accounts[policy], ring.batches[policy]
        found |= {
            f"version/{policy}": float(ledger.newest_number),
            f"buffered/{policy}": float(ring.experience.buffers[policy].num_sequences),
            f"expected/{policy}": float(account.expected),
            f"accepted/{policy}": float(account.accepted),
            f"unfinished/{policy}": float(account.unfinished),
            f"quota/{policy}": float(account.quota),
            f"staleness_max/{policy}": float(batches.staleness_max),
            f"waiting_ranks/{policy}": float(batches.num_waiting),
            f"masked_share/{policy}": ring.masked.share(policy),
        }
        metrics = ring.last_metrics[policy].items()
        found |= {f"step/{policy}/{name}": float(value) for name, value in metrics if math.isfinite(value)}
    return found


def _replicas(ring: Ring) -> dict[str, float]:
    now = ring.clock()
    found: dict[str, float] = {}
    for replica in ring.pool:
        found |= {
            f"replica_slots/{replica.replica_id}": float(replica.num_slots),
            f"replica_running/{replica.replica_id}": float(replica.num_running),
            f"replica_tokens_per_s/{replica.replica_id}": replica.tokens_per_s,
            f"replica_lease_left_s/{replica.replica_id}": max(0.0, replica.lease_until - now),
        }
    return found

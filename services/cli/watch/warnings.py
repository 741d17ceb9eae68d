"""Warnings that the progress of a run gives: refused records, checkpoints, the disk, masked rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from services.cli.console import format_bytes, format_span
from services.common.checkpoints.gauges import CheckpointGauge
from services.common.pb import run_pb2
from services.common.records.fates import FAILURES_PREFIX, RunCount
from services.common.records.masked import MaskedCount
from services.common.records.refusals import RefusalReason, counter_of

RARE_AFTER = 128  # sequences; a smaller share than a tenth of them in groups that can be trained causes a warning
DISK_WARNING_S = 48 * 3600.0  # a disk that fills up sooner causes a warning


def warnings_of(progress: run_pb2.RunProgress) -> list[str]:
    """Warnings that need attention, one line each; the first word is its subject."""
    counters = progress.counters
    found = (refusal_warning(counters), checkpoint_warning(counters), rare_groups_warning(counters))
    return [warning for warning in found if warning]


def refusal_warning(counters: Mapping[str, int]) -> str:
    """One line with the reasons for refused records, most first; empty while every record was taken.

    >>> refusal_warning({"refused_token_id": 3, "refused_reward": 1, "failures_timeout": 2})
    'refused records: 4, most because of token_id (token_id 3, reward 1); docs/protocol.md has the bounds'
    """
    found = {reason.value: counters.get(counter_of(reason), 0) for reason in RefusalReason}
    refused = sorted(((count, name) for name, count in found.items() if count), reverse=True)
    if not refused:
        return ""
    listed = ", ".join(f"{name} {count}" for count, name in refused)
    number = sum(count for count, _ in refused)
    return f"refused records: {number}, most because of {refused[0][1]} ({listed}); docs/protocol.md has the bounds"


def checkpoint_warning(counters: Mapping[str, int]) -> str:
    """One line about checkpoints that are damaged or could not be written; may be empty.

    >>> checkpoint_warning({"damaged_checkpoints": 1, "issued": 7})
    'checkpoints: 1 set aside as damaged (rollmill checkpoints RUN)'
    """
    told = []
    if damaged := counters.get(CheckpointGauge.DAMAGED, 0):
        told.append(f"{damaged} set aside as damaged (rollmill checkpoints RUN)")
    if failed := counters.get(CheckpointGauge.FAILED, 0):
        told.append(f"{failed} could not be written (checkpoint.failed in the trainer's log; is the disk full?)")
    return f"checkpoints: {'; '.join(told)}" if told else ""


def rare_groups_warning(counters: Mapping[str, int]) -> str:
    """One line with the share of sequences that passed dynamic sampling, where it is small; may be empty.

    >>> rare_groups_warning({"sequences_kept": 12, "sequences_filtered_equal_rewards": 588})
    'few groups can be trained: 12 of 600 sequences (2%), the others have equal rewards in their groups: normal at the start, \
else try easier or harder tasks or a larger rollout.group_size'
    """
    kept = counters.get(RunCount.SEQUENCES_KEPT, 0)
    judged = kept + counters.get(RunCount.SEQUENCES_EQUAL_REWARDS, 0)
    if judged < RARE_AFTER or kept >= 0.1 * judged:
        return ""
    told = f"few groups can be trained: {kept} of {judged} sequences ({kept / judged:.0%}), the others have equal rewards in"
    return f"{told} their groups: normal at the start, else try easier or harder tasks or a larger rollout.group_size"


def failed_rollouts(num_failed: int, counters: Mapping[str, int]) -> str:
    """The failed rollouts of an evaluation, with the reasons of all failures of the run, most first.

    >>> failed_rollouts(8, {"failures_timeout": 1, "failures_typeerror": 16, "tokens_sampled": 5})
    '8 failed (failures of the run: typeerror 16, timeout 1; the log of the replica has the errors)'
    """
    found = {name.removeprefix(FAILURES_PREFIX): n for name, n in counters.items() if name.startswith(FAILURES_PREFIX)}
    listed = ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda one: -one[1]))
    return f"{num_failed} failed (failures of the run: {listed}; the log of the replica has the errors)"


def journal_and_disk(progress: run_pb2.RunProgress) -> list[str]:
    """Warnings about the disk and the journal: a disk that fills up, records that cannot be used."""
    lines: list[str] = []
    disk = progress.disk
    if disk.HasField("full_in_s") and disk.full_in_s < DISK_WARNING_S:
        lines.append(
            f"disk full in {format_span(disk.full_in_s)} at {format_bytes(3600 * disk.bytes_per_s)} an hour "
            f"({format_bytes(disk.free_bytes)} free): make room, or docs/troubleshooting.md"
        )
    if progress.set_aside:
        found = ", ".join(f"{one.count} {one.kind} ({one.reason})" for one in progress.set_aside)
        lines.append(f"records of the journal that are not used: {found}: rollmill journal RUN list --set-aside")
    return lines


def masked_rollouts(counters: Mapping[str, int]) -> str:
    """Rollouts without a reward, and those that were repeated, by policy and cause; empty without any."""
    lines = []
    for name, count in sorted(counters.items()):
        kind, _, rest = name.partition("/")
        policy, _, cause = rest.partition("/")
        if kind in frozenset(MaskedCount) and count:
            lines.append(f"  {count} rollouts of {policy} {kind}: {cause.replace('_', ' ')}")
    return "\n".join(lines)

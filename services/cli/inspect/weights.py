"""``rollmill weights``: shows how weight versions reached the replicas of a run, stage by stage.

Reads ``metrics/orchestrator.jsonl``, where the orchestrator keeps the reports of replicas, during the run or later.
Writes a PNG on request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from services.cli.console import Column, FittingTable, format_bytes, format_seconds, say
from services.cli.console import pyplot as load_pyplot
from services.cli.inspect.run_state import Row, read_metrics
from services.common.errors import ConfigError
from services.common.records.types import TRANSFER_STAGES, WeightTransfer
from services.common.telemetry.metrics import RowKind
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.common.weights.manifest import Encoding


def read_transfers(run_dir: Path, *, policy: str | None = None, replica: str | None = None) -> list[Row]:
    """Transfers of a run, oldest first, failed ones included; ``ConfigError`` without any report."""
    rows = [row for row in read_metrics(run_dir) if row["kind"] == RowKind.WEIGHT_TRANSFER]
    if not rows:
        raise ConfigError(
            f"{run_dir} has no weight transfers yet: replicas report them when they take a version; scripted engines "
            "take none"
        )
    reports = [(ReportedTransfer.from_row(row), row) for row in rows]
    chosen = [
        (report.transfer.started_at, row)
        for report, row in reports
        if policy in (None, report.transfer.policy) and replica in (None, report.replica)
    ]
    if not chosen:
        known = sorted({_place(report) for report, _ in reports})
        raise ConfigError(f"no weight transfer matches; there are transfers of {', '.join(known)}")
    return [row for _, row in sorted(chosen, key=lambda found: found[0])]


def show(rows: Sequence[Row], console: Console, last: int) -> None:
    """Print one line per policy and replica, then the last transfers, then failures."""
    reports = [ReportedTransfer.from_row(row) for row in rows]
    console.print(_summary(rows))
    console.print(_newest(reports, last))
    arrived = [report.transfer for report in reports if not report.transfer.error]
    for policy, choice in sorted({found.policy: found.choice for found in arrived}.items()):
        if choice:
            say(console, f"transfer: auto of {policy} chose last: {choice}")
    failed = [report for report in reports if report.transfer.error]
    for report in failed[-last:]:
        found = report.transfer
        say(console, f"failed {found.policy} version {found.version} at {report.replica}: {found.error}", "red")
    if len(failed) > last:
        console.print(f"{len(failed) - last} earlier failures are not shown; --last shows more")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """One row per policy and replica: counts, bytes, and medians of the stages over completed transfers."""
    groups: dict[tuple[str, str], list[WeightTransfer]] = defaultdict(list)
    for row in rows:
        report = ReportedTransfer.from_row(row)
        groups[report.transfer.policy, report.replica].append(report.transfer)
    summaries = []
    for (policy, replica), members in sorted(groups.items()):
        arrived = [found for found in members if not found.error]
        deltas = [found for found in arrived if found.encoding == Encoding.DELTA]
        summaries.append(
            {
                "policy": policy,
                "replica": replica,
                "num_full": len(arrived) - len(deltas),
                "num_delta": len(deltas),
                "num_failed": len(members) - len(arrived),
                "bytes": sum(found.payload_size_bytes for found in arrived),
                "saved_bytes": sum(found.full_size_bytes - found.payload_size_bytes for found in arrived),
                "bits_per_change": _median(found.bits_per_change for found in deltas if found.num_changes),
                **{stage: _median(getattr(found, stage) for found in arrived) for stage in TRANSFER_STAGES},
                "serving_s": _median(serving_s(found) for found in arrived),
            }
        )
    return summaries


def serving_s(found: WeightTransfer) -> float:
    """From the first question to the engine serving the version; encoding happens within the fetch."""
    return found.fetch_s + found.verify_s + found.write_s + found.pause_s


def plot_transfers(rows: Sequence[Row], output: Path) -> Path:
    """Draw bytes and stages of every transfer that arrived, by version."""
    reports = [ReportedTransfer.from_row(row) for row in rows]
    groups: dict[str, list[WeightTransfer]] = defaultdict(list)
    for report in reports:
        if not report.transfer.error:
            groups[_place(report)].append(report.transfer)
    if not groups:
        raise ConfigError("every transfer failed: nothing to draw")
    pyplot = load_pyplot()
    figure, (sizes, times, pauses) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for name, members in groups.items():
        versions = [found.version for found in members]
        sizes.plot(versions, [found.payload_size_bytes / 2**20 for found in members], marker=".", label=name)
        times.plot(versions, [1000 * serving_s(found) for found in members], marker=".", label=name)
        pauses.plot(versions, [1000 * found.pause_s for found in members], marker=".", label=name)
    full = median(report.transfer.full_size_bytes / 2**20 for report in reports)
    sizes.axhline(full, color="grey", linestyle=":", label="in full")
    for axes, title in ((sizes, "payload, MiB"), (times, "fetch to serving, ms"), (pauses, "decoding stood still, ms")):
        axes.set(title=title, xlabel="version", ylim=(0, None))
        axes.grid(alpha=0.3)
    sizes.legend(fontsize="small")
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
    return output


def _summary(rows: Sequence[Row]) -> FittingTable:
    spare = {"write": 6, "verify": 5, "fetch": 4, "bits/change": 3, "saved": 2, "policy": 1}
    numbers = (
        "full",
        "delta",
        "failed",
        "sent",
        "saved",
        "bits/change",
        "fetch",
        "verify",
        "write",
        "pause",
        "serving",
    )
    table = FittingTable(
        [
            *(Column(name, spare=spare.get(name, 0)) for name in ("policy", "replica")),
            *(Column(name, "right", spare.get(name, 0)) for name in numbers),
        ],
        title="weights by replica (medians)",
    )
    for row in summarise(rows):
        table.add_row(
            row["policy"],
            row["replica"],
            str(row["num_full"]),
            str(row["num_delta"]),
            str(row["num_failed"]),
            format_bytes(row["bytes"]),
            format_bytes(row["saved_bytes"]),
            "" if row["bits_per_change"] is None else f"{row['bits_per_change']:.1f}",
            *(
                "" if row[stage] is None else format_seconds(row[stage])
                for stage in (*TRANSFER_STAGES[1:], "serving_s")
            ),
        )
    return table


def _newest(reports: Sequence[ReportedTransfer], last: int) -> FittingTable:
    spare = {"from": 9, "write": 8, "verify": 7, "encode": 6, "changed": 5, "bits/change": 4, "policy": 3, "how": 2}
    texts = ("policy", "version", "replica", "how", "from")
    numbers = ("bytes", "changed", "bits/change", "encode", "fetch", "verify", "write", "pause")
    table = FittingTable(
        [
            *(Column(name, spare=spare.get(name, 0)) for name in texts),
            *(Column(name, "right", spare.get(name, 0)) for name in numbers),
        ],
        title=f"last {min(last, len(reports))} of {len(reports)} transfers",
    )
    for report in reports[-last:]:
        found = report.transfer
        base = "" if found.base_version is None else f"{found.base_version} → "
        head = (found.policy, f"{base}{found.version}", report.replica)
        if found.error:
            table.add_row(*head, "[red]failed[/red]", *[""] * (1 + len(numbers)))
            continue
        how = " ".join(part for part in (found.encoding, found.transport) if part)
        table.add_row(
            *head,
            how,
            ", ".join(found.sources),
            format_bytes(found.payload_size_bytes),
            f"{found.num_changes:,}",
            f"{found.bits_per_change:.1f}" if found.encoding == Encoding.DELTA and found.num_changes else "",
            *(format_seconds(getattr(found, stage)) for stage in TRANSFER_STAGES),
        )
    return table


def _place(report: ReportedTransfer) -> str:
    return f"{report.transfer.policy} at {report.replica}"


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None

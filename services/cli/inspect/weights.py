"""``millrace weights``: shows how weight versions reached the replicas of a run, stage by stage.

Reads ``metrics/orchestrator.jsonl``, where the orchestrator keeps the reports of replicas, during the run or later.
Writes a PNG on request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from services.cli.console import drawing
from services.cli.console.plain import say
from services.cli.console.tables import Column, FittingTable
from services.cli.console.units import format_bytes, format_seconds
from services.cli.inspect.run_state import Row, read_metrics
from services.common.errors import ConfigError
from services.common.records.types import TRANSFER_STAGES
from services.common.telemetry.metrics import RowKind


def read_transfers(run_dir: Path, *, policy: str | None = None, replica: str | None = None) -> list[Row]:
    """Transfers of a run, oldest first, failed ones included; ``ConfigError`` without any report."""
    rows = [row for row in read_metrics(run_dir) if row["kind"] == RowKind.WEIGHT_TRANSFER]
    if not rows:
        raise ConfigError(
            f"{run_dir} has no weight transfers yet: replicas report them when they take a version; scripted engines "
            "take none"
        )
    chosen = [r for r in rows if policy in (None, r["policy"]) and replica in (None, r["replica"])]
    if not chosen:
        known = sorted({f"{row['policy']} at {row['replica']}" for row in rows})
        raise ConfigError(f"no weight transfer matches; there are transfers of {', '.join(known)}")
    return sorted(chosen, key=lambda row: row["started_at"])


def show(rows: Sequence[Row], console: Console, last: int) -> None:
    """Print one line per policy and replica, then the last transfers, then failures."""
    console.print(_summary(rows))
    console.print(_newest(rows, last))
    for policy, choice in sorted({row["policy"]: row.get("choice", "") for row in rows if not row["error"]}.items()):
        if choice:
            say(console, f"transfer: auto of {policy} chose last: {choice}")
    failed = [row for row in rows if row["error"]]
    for row in failed[-last:]:
        say(console, f"failed {row['policy']} version {row['version']} at {row['replica']}: {row['error']}", "red")
    if len(failed) > last:
        console.print(f"{len(failed) - last} earlier failures are not shown; --last shows more")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """One row per policy and replica: counts, bytes, and medians of the stages over completed transfers."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["policy"], row["replica"]].append(row)
    summaries = []
    for (policy, replica), members in sorted(groups.items()):
        arrived = [row for row in members if not row["error"]]
        deltas = [row for row in arrived if row["encoding"] == "delta"]
        summaries.append(
            {
                "policy": policy,
                "replica": replica,
                "num_full": len(arrived) - len(deltas),
                "num_delta": len(deltas),
                "num_failed": len(members) - len(arrived),
                "bytes": sum(row["payload_size_bytes"] for row in arrived),
                "saved_bytes": sum(row["full_size_bytes"] - row["payload_size_bytes"] for row in arrived),
                "bits_per_change": _median(bits_per_change(row) for row in deltas if row["num_changes"]),
                **{stage: _median(row[stage] for row in arrived) for stage in TRANSFER_STAGES},
                "serving_s": _median(serving_s(row) for row in arrived),
            }
        )
    return summaries


def bits_per_change(row: Row) -> float:
    """Of a delta with changes."""
    return 8 * float(row["payload_size_bytes"]) / float(row["num_changes"])


def serving_s(row: Row) -> float:
    """From the first question to the engine serving the version; encoding happens within the fetch."""
    return float(sum(row[stage] for stage in TRANSFER_STAGES if stage != "encode_s"))


def plot_transfers(rows: Sequence[Row], output: Path) -> Path:
    """Draw bytes and stages of every transfer that arrived, by version."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row["error"]:
            groups[f"{row['policy']} at {row['replica']}"].append(row)
    if not groups:
        raise ConfigError("every transfer failed: nothing to draw")
    pyplot = drawing.pyplot()
    figure, (sizes, times, pauses) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for name, members in groups.items():
        versions = [row["version"] for row in members]
        sizes.plot(versions, [row["payload_size_bytes"] / 2**20 for row in members], marker=".", label=name)
        times.plot(versions, [1000 * serving_s(row) for row in members], marker=".", label=name)
        pauses.plot(versions, [1000 * row["pause_s"] for row in members], marker=".", label=name)
    sizes.axhline(median(row["full_size_bytes"] / 2**20 for row in rows), color="grey", linestyle=":", label="in full")
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


def _newest(rows: Sequence[Row], last: int) -> FittingTable:
    spare = {"from": 9, "write": 8, "verify": 7, "encode": 6, "changed": 5, "bits/change": 4, "policy": 3, "how": 2}
    texts = ("policy", "version", "replica", "how", "from")
    numbers = ("bytes", "changed", "bits/change", "encode", "fetch", "verify", "write", "pause")
    table = FittingTable(
        [
            *(Column(name, spare=spare.get(name, 0)) for name in texts),
            *(Column(name, "right", spare.get(name, 0)) for name in numbers),
        ],
        title=f"last {min(last, len(rows))} of {len(rows)} transfers",
    )
    for row in rows[-last:]:
        base = "" if row["base_version"] is None else f"{row['base_version']} → "
        head = (row["policy"], f"{base}{row['version']}", row["replica"])
        if row["error"]:
            table.add_row(*head, "[red]failed[/red]", *[""] * (1 + len(numbers)))
            continue
        how = " ".join(part for part in (row["encoding"], row["transport"]) if part)
        table.add_row(
            *head,
            how,
            ", ".join(row["sources"]),
            format_bytes(row["payload_size_bytes"]),
            f"{row['num_changes']:,}",
            f"{bits_per_change(row):.1f}" if row["encoding"] == "delta" and row["num_changes"] else "",
            *(format_seconds(row[stage]) for stage in TRANSFER_STAGES),
        )
    return table


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None

"""Turns a run's progress into what a person reads: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.checkpoints.told import checkpoint_warning
from services.cli.refused import refusal_warning
from services.cli.tables import Column, FittingTable
from services.cli.time_table import shares_of, time_table
from services.cli.units import format_bytes, format_change, format_span
from services.common.pb import run_pb2

DISK_WARNING_S = 48 * 3600.0  # a disk that is full sooner is told

STATE_WORDS = {
    run_pb2.RUN_STATE_STARTING: "waiting for weights and replicas",
    run_pb2.RUN_STATE_EVALUATING_START: "evaluating before training",
    run_pb2.RUN_STATE_TRAINING: "training",
    run_pb2.RUN_STATE_PAUSED: "paused",
    run_pb2.RUN_STATE_EVALUATING_END: "evaluating after training",
    run_pb2.RUN_STATE_FINISHED: "finished",
    run_pb2.RUN_STATE_STOPPED: "stopped",
}


def state_word(state: int) -> str:
    return STATE_WORDS.get(state, "unknown")  # type: ignore[call-overload,no-any-return]


def warnings_of(progress: run_pb2.RunProgress) -> list[str]:
    """What somebody should look at, a line each, with its subject before the colon."""
    found = (refusal_warning(progress.counters), checkpoint_warning(progress.counters))
    return [warning for warning in found if warning]


def render(progress: run_pb2.RunProgress, title: str) -> RenderableType:
    """The whole run as one panel: policies, replicas, evaluations, who waits for whom."""
    parts: list[RenderableType] = [_policies(progress), _replicas(progress)]
    if progress.evaluations:
        parts.append(evaluations_table(progress))
    if progress.accounts:
        parts.append(time_table(shares_of(progress.accounts)))
    if progress.stalls:
        parts.append(Text("\n".join(stall_words(stall) for stall in progress.stalls), style="bold red"))
    for warning in warnings_of(progress):
        parts.append(Text(f"  {warning}", style="bold yellow"))
    if warnings := journal_and_disk(progress):
        parts.append(Text("\n".join(f"  {line}" for line in warnings), style="bold yellow"))
    if progress.waits:
        parts.append(Text("\n".join(f"  {wait}" for wait in progress.waits), style="yellow"))
    masked = _masked(progress.counters)
    if masked:
        parts.append(Text(masked, style="yellow"))
    if progress.counters:
        shown = "  ".join(
            f"{name} {count}" for name, count in sorted(progress.counters.items()) if count and "/" not in name
        )
        parts.append(Text(f"  {shown}", style="dim"))
    return Panel(Group(*parts), title=title, subtitle=state_word(progress.state))


def journal_and_disk(progress: run_pb2.RunProgress) -> list[str]:
    """What somebody should look at before it stops the run: a disk that fills up, records that cannot be used."""
    lines: list[str] = []
    disk = progress.disk
    if disk.HasField("full_in_s") and disk.full_in_s < DISK_WARNING_S:
        lines.append(
            f"disk full in {format_span(disk.full_in_s)} at {format_bytes(3600 * disk.bytes_per_s)} an hour "
            f"({format_bytes(disk.free_bytes)} free): make room, or docs/troubleshooting.md"
        )
    if progress.set_aside:
        found = ", ".join(f"{one.count} {one.kind} ({one.reason})" for one in progress.set_aside)
        lines.append(f"records of the journal that are not used: {found}: millrace journal RUN list --set-aside")
    return lines


def _masked(counters: Mapping[str, int]) -> str:
    """Rollouts without a reward, and those that were played again, by policy and what failed; empty without any."""
    lines = []
    for name, count in sorted(counters.items()):
        kind, _, rest = name.partition("/")
        policy, _, cause = rest.partition("/")
        if kind in ("masked", "redrawn") and count:
            lines.append(f"  {count} rollouts of {policy} {kind}: {cause.replace('_', ' ')}")
    return "\n".join(lines)


def stall_words(stall: run_pb2.Stall) -> str:
    """A standstill in plain words, with the way to its cause and what to do."""
    since = time.strftime("%H:%M:%S", time.localtime(stall.since.ToSeconds()))
    lines = [f"  STALLED since {since}: {stall.component}, {stall.cause.replace('_', ' ')}: {stall.detail}"]
    lines += [f"    {link}" for link in stall.chain]
    return "\n".join([*lines, f"    what to do: {stall.advice}"])


def _policies(progress: run_pb2.RunProgress) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for column in ("policy", "step", "", "rollout\nreward", "staleness", "buffered", "expected", "trainer"):
        # Words are kept whole; the bar, which has no name, gives way.
        left = column in ("policy", "trainer", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "")
    for policy in progress.policies:
        table.add_row(
            policy.policy,
            f"{max(0, policy.version)}/{policy.num_steps}",
            ProgressBar(total=policy.num_steps, completed=max(0, policy.version), width=24),
            _reward(policy),
            f"≤ {policy.staleness_max}",
            str(policy.num_buffered),
            str(policy.num_expected),
            policy.trainer_state,
        )
    return table


def _replicas(progress: run_pb2.RunProgress) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for column in ("replica", "rollouts", "tokens/s", "versions", "lease"):
        table.add_column(column, justify="left" if column in ("replica", "versions") else "right")
    for replica in progress.replicas:
        table.add_row(
            Text(replica.replica_id + (" (draining)" if replica.draining else "")),  # a peer's word, and no markup
            f"{replica.num_running}/{replica.num_slots}",
            f"{replica.tokens_per_s:,.0f}",
            " ".join(f"{policy}@{version}" for policy, version in sorted(replica.versions.items())),
            f"{replica.lease_left_s:.0f} s",
        )
    return table


def evaluations_table(progress: run_pb2.RunProgress) -> FittingTable:
    """Evaluations finished so far; ``change`` is that from the run's first of the same kind, paired by tasks."""
    table = FittingTable(
        [
            *(Column("evaluation"), Column("versions", spare=2), Column("dataset"), Column("reward", "right")),
            *(Column("95%", "right"), Column("change (95%)", "right"), Column("pass@k", spare=1)),
            *(Column("trajectories", "right", 3), Column("failed", "right")),
        ],
        box=None,
    )
    for result in progress.evaluations:
        name, versions = result.name, _versions(result)
        if len(result.datasets) > 1:
            counts = (str(result.num_trajectories), str(result.num_failed))
            change = _change(result.difference if result.HasField("difference") else None)
            table.add_row(name, versions, "overall", f"{result.mean_reward:.3f}", "", change, "", *counts)
            name = versions = ""
        for found in result.datasets:
            reward = found.mean_reward
            table.add_row(
                *(name, versions, found.name, f"{reward.value:.3f}", f"{reward.low:.3f}-{reward.high:.3f}"),
                _change(found.difference if found.HasField("difference") else None),
                "  ".join(f"@{passed.k} {passed.share.value:.3f}" for passed in found.pass_at),
                *(str(found.num_items * found.samples_per_item), str(len(found.failed))),
            )
            name = versions = ""
    return table


def _change(difference: run_pb2.Estimate | None) -> str:
    """From the first evaluation of the same kind, paired by tasks."""
    return "" if difference is None else format_change(difference.value, difference.low, difference.high)


def _versions(result: run_pb2.EvaluationResult) -> str:
    """Of one version where it was pinned, else the range that it was played on."""
    parts = []
    for policy, version in sorted(result.versions.items()):
        newest = result.newest_versions.get(policy, version)
        parts.append(f"{policy}@{version}" if newest == version else f"{policy}@{version}..{newest} (not pinned)")
    return " ".join(parts)


class StallsTold:
    """Tells of each stall once, and of its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stalled: dict[tuple[str, str], str] = {}

    def tell(self, stalls: Iterable[run_pb2.Stall]) -> None:
        now = {(stall.component, stall.cause): stall for stall in stalls}
        for key in [key for key in self._stalled if key not in now]:
            self._console.print(f"goes on again: {self._stalled.pop(key)}", style="green", markup=False)
        for key, stall in now.items():
            if key not in self._stalled:
                self._stalled[key] = f"{stall.component}, {stall.cause.replace('_', ' ')}"
                words = stall_words(stall)  # of peers: brackets in it are no markup
                self._console.print(words, style="bold red", highlight=False, soft_wrap=True, markup=False)


class ProgressView:
    """Shows progress on a console until closed."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._last_line = ""
        self._num_evaluations = 0
        self._last_waits: list[str] = []
        self._warned: set[str] = set()
        self._stalls = StallsTold(console)
        self._last: run_pb2.RunProgress | None = None
        self._warned_of: set[str] = set()

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def silent(self, stall: run_pb2.Stall) -> None:
        """The orchestrator itself does not answer: what it last said, with that."""
        known = run_pb2.RunProgress()
        if self._last is not None:
            known.CopyFrom(self._last)
        del known.stalls[:]
        known.stalls.append(stall)
        self._show(known)

    def show(self, progress: run_pb2.RunProgress) -> None:
        self._last = progress
        self._show(progress)

    def _print(self, text: str, style: str | None = None) -> None:
        """What peers say may hold brackets, which are no markup."""
        self._console.print(text, style=style, markup=False)

    def _show(self, progress: run_pb2.RunProgress) -> None:
        if self._live:
            self._live.update(render(progress, self._title), refresh=True)
            return
        self._stalls.tell(progress.stalls)
        for warning in warnings_of(progress):
            if (subject := warning.partition(":")[0]) not in self._warned_of:
                self._warned_of.add(subject)  # once: the counters say how many there are by now
                self._print(warning, style="bold yellow")
        for result in progress.evaluations[self._num_evaluations :]:
            change = _change(result.difference if result.HasField("difference") else None)
            told = f", change {change} since {result.compared_with}" if change else ""
            self._print(f"evaluation {result.name}: {result.mean_reward:.3f} over {result.num_trajectories}{told}")
        self._num_evaluations = len(progress.evaluations)
        for line in journal_and_disk(progress):
            subject = line.partition(" ")[0] if line.startswith("disk") else line
            if subject not in self._warned:
                self._warned.add(subject)
                self._print(line, style="bold yellow")
        if progress.state == run_pb2.RUN_STATE_PAUSED and list(progress.waits) != self._last_waits:
            self._last_waits = list(progress.waits)
            self._print("\n".join(progress.waits), style="yellow")
        line = " | ".join(_line(policy) for policy in progress.policies) or state_word(progress.state)
        if line != self._last_line:
            self._last_line = line
            self._print(f"{state_word(progress.state)}: {line} | {progress.tokens_per_s:,.0f} tokens/s")


def _line(policy: run_pb2.PolicyProgress) -> str:
    # Only what changes with a step: one line per step, not one per poll.
    step = f"{policy.policy} step {max(0, policy.version)}/{policy.num_steps}"
    return f"{step} rollout reward {_reward(policy)} staleness ≤ {policy.staleness_max}"


def _reward(policy: run_pb2.PolicyProgress) -> str:
    """Of rollouts that finished since the batch before, raw; a dash where none did."""
    mean = policy.metrics.get("rollout_reward_mean")
    return "-" if mean is None else f"{mean:.3f}"

"""Renders the progress of a run: a live table on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.console import (
    Column,
    FittedPanel,
    FittingTable,
    Section,
    format_change,
    format_clock,
    format_reward,
    say,
    source_table,
)
from services.cli.watch.warnings import failed_rollouts, journal_and_disk, masked_rollouts, warnings_of
from services.common.pb import account_pb2, run_pb2
from services.common.records.fates import RunCount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.metrics import StepKey, TrainerKey, sources_in
from services.orchestrator.dispatch.evaluation_pass import played_by
from services.orchestrator.stalls.facts import Cause

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


def render(progress: run_pb2.RunProgress, title: str, height: int | None = None) -> RenderableType:
    """The whole run as one panel, problems first; ``height`` is the number of lines."""
    sections: list[Section] = []

    def add(name: str, text: str, style: str) -> None:
        if text:
            sections.append(Section(name, Text(text, style=style), may_be_cut=True))

    add("stalls", "\n".join(stall_words(stall) for stall in progress.stalls), "bold red")
    sections.append(Section("progress", Text(f"  {time_words(progress)}"), may_be_cut=True))
    sections.append(Section("policies", _policies(progress), may_be_cut=True))
    if any(sources_in(policy.metrics) for policy in progress.policies):
        sections.append(Section("sources", source_table(progress), may_be_cut=True))
    warnings = [*warnings_of(progress), *journal_and_disk(progress)]
    add("warnings", "\n".join(f"  {line}" for line in warnings), "bold yellow")
    sections.append(Section("replicas", _replicas(progress), may_be_cut=True))
    add("waits", "\n".join(f"  {wait}" for wait in progress.waits), "yellow")
    if progress.HasField("threshold"):
        sections.append(Section("threshold", Text(f"  {threshold_words(progress.threshold)}")))
    if progress.evaluations:
        sections.append(Section("evaluations", evaluations_table(progress, newest=height is not None)))
    if progress.accounts:
        sections.append(Section("where the time went", time_table(shares_of(progress.accounts)), may_be_cut=True))
    add("rollouts without a reward", masked_rollouts(progress.counters), "yellow")
    counters = [f"{name} {count}" for name, count in sorted(progress.counters.items()) if count and "/" not in name]
    add("counters", f"  {'  '.join(counters)}" if counters else "", "dim")
    return FittedPanel(sections, title=title, subtitle=state_word(progress.state), height=height)


def time_words(progress: run_pb2.RunProgress) -> str:
    """Elapsed time, and about how long the training steps that are left take at the pace of those that are done."""
    if not progress.HasField("started_at") or not progress.HasField("at"):
        return f"{progress.tokens_per_s:,.0f} tokens/s"
    elapsed = max(0.0, (progress.at.ToNanoseconds() - progress.started_at.ToNanoseconds()) / 1e9)
    told = [f"{format_clock(elapsed)} elapsed"]
    left = [_seconds_left(policy) for policy in progress.policies]
    known = [seconds for seconds in left if seconds is not None]
    if progress.state == run_pb2.RUN_STATE_TRAINING and known and len(known) == len(left):
        bound = "at most " if progress.HasField("threshold") and not progress.threshold.reached else ""
        told.append(f"{bound}about {format_clock(max(known))} left")
    told.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    return ", ".join(told)


def _seconds_left(policy: run_pb2.PolicyProgress) -> float | None:
    """None before the first step."""
    elapsed = policy.metrics.get(StepKey.ELAPSED_S)
    if elapsed is None or policy.version <= 0:
        return None
    return max(0, policy.num_steps - policy.version) * elapsed / policy.version


def threshold_words(threshold: run_pb2.Threshold) -> str:
    """How far the run is from the threshold that ends training."""
    if threshold.reached:
        when = f"after training step {threshold.step}" if threshold.step else "before training"
        return f"threshold reached {when}, {threshold.seconds:.0f} s into the run: {threshold.wanted}"
    newest = f"{threshold.newest:.3f}" if threshold.HasField("newest") else "not evaluated yet"
    return f"training ends at {threshold.wanted} (newest: {newest})"


def stall_words(stall: run_pb2.Stall) -> str:
    """A stall in words, with the chain to its cause and the remedy."""
    since = time.strftime("%H:%M:%S", time.localtime(stall.since.ToSeconds()))
    lines = [f"  STALLED since {since}: {stall.component}, {stall.cause.replace('_', ' ')}: {stall.detail}"]
    lines += [f"    {link}" for link in stall.chain]
    return "\n".join([*lines, f"    what to do: {stall.advice}"])


def _policies(progress: run_pb2.RunProgress) -> RenderableType:
    table = FittingTable(
        [
            *(Column("policy"), Column("step", "right"), Column("done", spare=1), Column("reward", "right")),
            *(Column("loss", "right"), Column("staleness", "right", 2), Column("buffered", "right", 4)),
            *(Column("expected", "right", 3), Column("trainer")),
        ],
        box=None,
        name_left_out=False,
    )
    for policy in progress.policies:
        step = max(0, policy.version)
        loss = policy.metrics.get(TrainerKey.LOSS.in_row)
        table.add_row(
            *(Text(policy.policy), f"{step}/{policy.num_steps}", _bar(step, policy.num_steps), _reward(policy)),
            *("-" if loss is None else f"{loss:.3g}", f"max {policy.staleness_max}", str(policy.num_buffered)),
            *(str(policy.num_expected), Text(policy.trainer_state.replace("_", " "))),
        )
    return table


_BAR_WIDTH = 16


def _bar(done: int, whole: int) -> Text:
    """A bar of a fixed width: one that gives way shrinks to a dot."""
    full = round(_BAR_WIDTH * min(done, whole) / whole) if whole else _BAR_WIDTH
    return Text.assemble(("━" * full, "green"), ("─" * (_BAR_WIDTH - full), "dim"))


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


def evaluations_table(progress: run_pb2.RunProgress, newest: bool = False) -> FittingTable:
    """Evaluations finished so far, or the newest of each kind; ``change`` is that from the run's first of the same kind, paired
    by tasks."""
    results = {result.name.partition("/")[2] if newest else result.name: result for result in progress.evaluations}
    table = FittingTable(
        [
            *(Column("evaluation"), Column("versions", spare=2), Column("dataset"), Column("reward", "right")),
            *(Column("95%", "right"), Column("change (95%)", "right"), Column("pass@k", spare=1)),
            *(Column("trajectories", "right", 3), Column("failed", "right")),
        ],
        box=None,
    )
    for result in results.values():
        name, versions = result.name, _versions(result)
        if len(result.datasets) > 1:
            counts = (str(result.num_trajectories), str(result.num_failed))
            change = _change(result.difference if result.HasField("difference") else None)
            table.add_row(name, versions, "overall", _mean_reward(result), "", change, "", *counts)
            name = versions = ""
        for found in result.datasets:
            reward, known = found.mean_reward, found.HasField("mean_reward")
            table.add_row(
                *(name, versions, found.name, f"{reward.value:.3f}" if known else "-"),
                f"{reward.low:.3f}-{reward.high:.3f}" if known else "",
                _change(found.difference if found.HasField("difference") else None),
                "  ".join(f"@{passed.k} {passed.share.value:.3f}" for passed in found.pass_at),
                *(str(found.num_items * found.samples_per_item), str(len(found.failed))),
            )
            name = versions = ""
    return table


def _mean_reward(result: run_pb2.EvaluationResult) -> str:
    return format_reward(result.mean_reward if result.HasField("mean_reward") else None)


def _change(difference: run_pb2.Estimate | None) -> str:
    """From the first evaluation of the same kind, paired by tasks."""
    return "" if difference is None else format_change(difference.value, difference.low, difference.high)


def _versions(result: run_pb2.EvaluationResult) -> str:
    """Of one pinned version, else the range of versions that generated the evaluation."""
    parts = []
    for policy, version in sorted(result.versions.items()):
        newest = result.newest_versions.get(policy, version)
        parts.append(f"{policy}@{version}" if newest == version else f"{policy}@{version}..{newest} (not pinned)")
    return " ".join(parts)


WAITS_EVERY_S = 10.0  # lines of progress while the steps stand still
_WAITING = (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_EVALUATING_START, run_pb2.RUN_STATE_EVALUATING_END)


class StallsTold:
    """Reports each stall once, and its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stalled: dict[tuple[str, str], str] = {}

    def tell(self, stalls: Iterable[run_pb2.Stall]) -> None:
        now = {(stall.component, stall.cause): stall for stall in stalls}
        for key in [key for key in self._stalled if key not in now]:
            say(self._console, f"goes on again: {self._stalled.pop(key)}", "green")
        for key, stall in now.items():
            if key not in self._stalled:
                self._stalled[key] = f"{stall.component}, {stall.cause.replace('_', ' ')}"
                words = stall_words(stall)  # of peers: brackets in it are no markup
                say(self._console, words, "bold red")


class ProgressView:
    """Shows progress on a console until closed."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._last_line = ""
        self._num_evaluations = 0
        self._last_waits: list[str] = []
        self._waits_due_at = 0.0
        self._warned: set[str] = set()
        self._stalls = StallsTold(console)
        self._last: run_pb2.RunProgress | None = None
        self._told_threshold = False
        self._num_pauses = 0  # before the current pause

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def silent(self, stall: run_pb2.Stall) -> None:
        """Show the last known state with the stall of the orchestrator itself."""
        known = run_pb2.RunProgress()
        if self._last is not None:
            known.CopyFrom(self._last)
        del known.stalls[:]
        known.stalls.append(stall)
        self._show(known)

    @property
    def paused_itself(self) -> str:
        """The reason of a pause that the run made by itself and that a person ends; else empty."""
        if self._last is None or self._last.counters.get(RunCount.PAUSES_FOR_FAILURES, 0) <= self._num_pauses:
            return ""
        return next(
            (s.detail for s in self._last.stalls if s.cause in (Cause.ALL_FAIL, Cause.MASKED, Cause.NUMERICS)), ""
        )

    def show(self, progress: run_pb2.RunProgress) -> None:
        self._last = progress
        if progress.state != run_pb2.RUN_STATE_PAUSED:
            self._num_pauses = progress.counters.get(RunCount.PAUSES_FOR_FAILURES, 0)
        self._show(progress)

    def _show(self, progress: run_pb2.RunProgress) -> None:
        if self._live:
            self._live.update(render(progress, self._title, self._console.size.height - 1), refresh=True)
            return
        self._stalls.tell(progress.stalls)
        for warning in [*warnings_of(progress), *journal_and_disk(progress)]:
            if (subject := warning.split(maxsplit=1)[0]) not in self._warned:
                self._warned.add(subject)  # once: the numbers behind it change
                say(self._console, warning, "bold yellow")
        for result in progress.evaluations[self._num_evaluations :]:
            change = _change(result.difference if result.HasField("difference") else None)
            told = f", change {change} since {result.compared_with}" if change else ""
            named = result.name + played_by(result.name, result.versions, result.newest_versions)
            failed = f"; {failed_rollouts(result.num_failed, progress.counters)}" if result.num_failed else ""
            opaque = (
                f"; {result.num_opaque} rewards by opaque tests, which programs can forge" if result.num_opaque else ""
            )
            say(
                self._console,
                f"evaluation {named}: {_mean_reward(result)} over {result.num_trajectories}{told}{failed}{opaque}",
                "bold yellow" if failed else None,
            )
        self._num_evaluations = len(progress.evaluations)
        if progress.threshold.reached and not self._told_threshold:
            self._told_threshold = True
            say(self._console, threshold_words(progress.threshold))
        due = progress.state in _WAITING and time.monotonic() >= self._waits_due_at
        if due and list(progress.waits) != self._last_waits:
            self._last_waits = list(progress.waits)
            self._waits_due_at = time.monotonic() + WAITS_EVERY_S
            say(self._console, "\n".join(progress.waits), "yellow")
        line = " | ".join(_line(policy) for policy in progress.policies) or state_word(progress.state)
        if line != self._last_line:
            self._last_line = line
            rate = f" | {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
            say(self._console, f"{state_word(progress.state)}: {line}{rate}")


def _line(policy: run_pb2.PolicyProgress) -> str:
    # Only what changes with a step: one line per step, not one per poll.
    step = f"{policy.policy} step {max(0, policy.version)}/{policy.num_steps}"
    return f"{step} rollout reward {_reward(policy)} largest staleness {policy.staleness_max}"


def _reward(policy: run_pb2.PolicyProgress) -> str:
    """Of rollouts that finished since the batch before, raw; a dash where none did."""
    mean = policy.metrics.get(StepKey.ROLLOUT_REWARD_MEAN)
    return "-" if mean is None else f"{mean:.3f}"


LARGEST = 3
LEAST_SHARE = 0.005  # of what is shown
_QUIET = (ActivityName.NOT_ASKED, ActivityName.NOTHING_TO_SEND, ActivityName.UP_TO_DATE)
_QUIET_SHARE = 0.9  # of a component that is left out: it waits to be asked, as it should


def time_table(shares: Mapping[str, Mapping[str, float]]) -> Table:
    """``shares``: component -> "activity" or "activity -> component waited for" -> share of its time, largest first. Components that
    were hardly asked for anything are left out."""
    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("component", no_wrap=True)
    for heading in ("where the time went", *[""] * (LARGEST - 1)):
        table.add_column(heading)
    for component, of_one in shares.items():
        if sum(of_one.get(activity, 0.0) for activity in _QUIET) >= _QUIET_SHARE:
            continue
        cells = [f"{share:.0%} {what}" for what, share in list(of_one.items())[:LARGEST] if share >= LEAST_SHARE]
        # As texts: names are peers', and no markup.
        table.add_row(*map(Text, (component, *cells, *[""] * (LARGEST - len(cells)))))
    return table


def shares_of(accounts: Iterable[account_pb2.TimeAccount]) -> dict[str, dict[str, float]]:
    """As ``time_table`` takes them."""
    found: dict[str, dict[str, float]] = {}
    for account in accounts:
        whole = sum(activity.seconds for activity in account.activities) or 1.0
        found[account.component] = {
            f"{activity.activity} -> {activity.on}" if activity.on else activity.activity: activity.seconds / whole
            for activity in sorted(account.activities, key=lambda activity: -activity.seconds)
        }
    return found

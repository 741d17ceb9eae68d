"""A run in progress on a terminal: the calls to its orchestrator, warnings, the live view, and lines beside it.

A command finds a run in progress by the run's directory, which has address and keys, or by an address and ROLLMILL_KEYS. Calls
are synchronous and have deadlines. The view is a live table on a terminal, and one line per step elsewhere. The launcher also
prints, once for each change: stalls while a run starts, for with a full disk the run never becomes ready, and only the
orchestrator knows the reason; a tracker that stops taking rows, or takes them again; a stall of the orchestrator without
answers, which reports the stalls of all others itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc
import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.cli.console import (
    FittingTable,
    columns,
    format_bytes,
    format_change,
    format_clock,
    format_reward,
    format_span,
    say,
    source_table,
)
from services.cli.inspect.run_state import check_run_directory, why_silent
from services.cli.keys import keys_there, operate
from services.cli.plan import orchestrator_address
from services.common.checkpoints import CheckpointGauge
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import AccessError, ConfigError, DeadlineError, InfrastructureError
from services.common.kept_tokens import MaskedCount
from services.common.net.hosts import ORCHESTRATOR, check_place, is_known
from services.common.pb import account_pb2, run_pb2, run_pb2_grpc
from services.common.records import FAILURES_PREFIX, RefusalReason, RunCount, counter_of
from services.common.rpc.client import from_call, sync_channel
from services.common.security import identity
from services.common.security.identity import refusal
from services.common.security.keys import VARIABLE, Peer
from services.common.system.machine import RESERVE_BYTES
from services.common.telemetry import accounts as components
from services.common.telemetry.accounts import AccountState, ActivityName
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import StepKey, TrainerKey, sources_in
from services.common.wire import read
from services.orchestrator.evaluation import played_by
from services.orchestrator.stalls import Cause
from services.orchestrator.trackers import all_sent, followed, read_position

CALL_DEADLINE_S = 5.0
Answer = TypeVar("Answer")


class OrchestratorClient:
    """Raises ``InfrastructureError`` with the address when the orchestrator does not answer, ``AccessError`` for wrong
    keys.

    ``why_silent`` gives a likely reason and the remedy when no process listens there.
    """

    def __init__(self, address: str, why_silent: Callable[[], str] = lambda: "is the run still going?") -> None:
        self.address = address
        self._why_silent = why_silent
        self._connect()

    def _connect(self) -> None:
        self._channel = sync_channel(self.address, Peer.ORCHESTRATOR)
        self._run = run_pb2_grpc.RunServiceStub(self._channel)

    def reconnect(self) -> None:
        """Connect again with the present identity of this process: its keys have changed."""
        self._channel.close()
        self._connect()

    def close(self) -> None:
        self._channel.close()

    def get_run(self) -> run_pb2.GetRunResponse:
        return self._call(self._run.GetRun, run_pb2.GetRunRequest())

    def pause(self) -> None:
        self._call(self._run.PauseRun, run_pb2.PauseRunRequest())

    def resume(self) -> None:
        self._call(self._run.ResumeRun, run_pb2.ResumeRunRequest())

    def stop(self, reason: str) -> None:
        self._call(self._run.StopRun, run_pb2.StopRunRequest(reason=reason))

    def _call(self, method: Callable[..., Answer], request: object) -> Answer:
        try:
            return method(request, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            told = from_call(error, self.address)
        if isinstance(told, AccessError):
            raise told
        if not isinstance(told, InfrastructureError | DeadlineError):
            raise InfrastructureError(told.message)
        if (refused := refusal(self.address, identity.current(), Peer.ORCHESTRATOR)) is not None:
            raise refused
        if isinstance(told, DeadlineError):
            raise InfrastructureError(f"{self.address} did not answer within {CALL_DEADLINE_S:g} s")
        if is_known(self.address):
            raise InfrastructureError(f"no answer from {self.address}: {self._why_silent()}")
        raise InfrastructureError(
            f"this machine cannot resolve the host of {self.address}: write a name or address that it can"
        )


NAME_IT = "name the run's directory (runs/NAME), or another address with --orchestrator"


def check_answers(client: OrchestratorClient, run: Path | None) -> run_pb2.GetRunResponse:
    """The state of ``run`` by its orchestrator; of any run, for None.

    Raises:
        InfrastructureError: it does not answer, or another run has its port.
    """
    answer = client.get_run()
    if run is not None and answer.run_id != load_resolved(run).run.id:
        raise InfrastructureError(f"at {client.address} another run answers ({answer.run_id}): {why_silent(run)}")
    return answer


def reach(run: Path | None, address: str | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys, if any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for both at once, no run directory or address, and for keys that cannot be used.
    """
    if run is None:
        place = address or ORCHESTRATOR
        check_place(place)
        given = os.environ.get(VARIABLE)
        operate(Path(given) if given else None)
        why = (
            NAME_IT if address else f"{Path('runs').absolute()} has no run, and this is the default address; {NAME_IT}"
        )
        return OrchestratorClient(place, lambda: why)
    if address is not None:
        raise ConfigError("name the run's directory or --orchestrator HOST:PORT, not both")
    check_run_directory(run)
    recipe = load_resolved(run)
    keys = keys_there(recipe, run)
    if keys is None and recipe.needs_keys:
        raise ConfigError(
            f"{run} does not have the keys of its run: set {VARIABLE} to the directory it was started with"
        )
    operate(keys)
    return OrchestratorClient(orchestrator_address(recipe), lambda: why_silent(run))


RARE_AFTER = 128  # sequences; a smaller share than a tenth of them in groups that can be trained causes a warning
DISK_WARNING_S = 48 * 3600.0  # a disk that fills up sooner causes a warning


def warnings_of(progress: run_pb2.RunProgress) -> list[str]:
    """Warnings that need attention, one line each; the first word is its subject."""
    counters, lines = progress.counters, []
    refused = sorted(((counters.get(counter_of(r), 0), r.value) for r in RefusalReason), reverse=True)
    if number := sum(count for count, _ in refused):
        listed = ", ".join(f"{name} {count}" for count, name in refused if count)
        lines.append(
            f"refused records: {number}, most because of {refused[0][1]} ({listed}); docs/protocol.md has the bounds"
        )
    damaged, failed = counters.get(CheckpointGauge.DAMAGED, 0), counters.get(CheckpointGauge.FAILED, 0)
    checkpoints = [f"{damaged} set aside as damaged (rollmill checkpoints RUN)"] if damaged else []
    if failed:
        checkpoints.append(f"{failed} could not be written (checkpoint.failed in the trainer's log; is the disk full?)")
    if checkpoints:
        lines.append(f"checkpoints: {'; '.join(checkpoints)}")
    kept = counters.get(RunCount.SEQUENCES_KEPT, 0)
    judged = kept + counters.get(RunCount.SEQUENCES_EQUAL_REWARDS, 0)
    if judged >= RARE_AFTER and kept < 0.1 * judged:
        lines.append(
            f"few groups can be trained: {kept} of {judged} sequences ({kept / judged:.0%}), the others have equal rewards in "
            "their groups: normal at the start, else try easier or harder tasks or a larger rollout.group_size"
        )
    disk = progress.disk
    if disk.HasField("full_in_s") and disk.full_in_s < DISK_WARNING_S:
        lines.append(
            f"disk full in {format_span(disk.full_in_s)} at {format_bytes(3600 * disk.bytes_per_s)} an hour "
            f"({format_bytes(disk.free_bytes)} free): make room, or docs/troubleshooting.md"
        )
    if progress.set_aside:
        aside = ", ".join(f"{one.count} {one.kind} ({one.reason})" for one in progress.set_aside)
        lines.append(f"records of the journal that are not used: {aside}: rollmill journal RUN list --set-aside")
    return lines


def failed_rollouts(num_failed: int, counters: Mapping[str, int]) -> str:
    """The failed rollouts of an evaluation, with the reasons of all failures of the run, most first.

    >>> failed_rollouts(8, {"failures_timeout": 1, "failures_typeerror": 16, "tokens_sampled": 5})
    '8 failed (failures of the run: typeerror 16, timeout 1; the log of the replica has the errors)'
    """
    found = {name.removeprefix(FAILURES_PREFIX): n for name, n in counters.items() if name.startswith(FAILURES_PREFIX)}
    listed = ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda one: -one[1]))
    return f"{num_failed} failed (failures of the run: {listed}; the log of the replica has the errors)"


def masked_rollouts(counters: Mapping[str, int]) -> list[str]:
    """Rollouts without a reward, and those that were repeated, by policy and cause; empty without any."""
    lines = []
    for name, count in sorted(counters.items()):
        kind, _, rest = name.partition("/")
        policy, _, cause = rest.partition("/")
        if kind in frozenset(MaskedCount) and count:
            lines.append(f"{count} rollouts of {policy} {kind}: {cause.replace('_', ' ')}")
    return lines


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


def render(progress: run_pb2.RunProgress, title: str, *, newest: bool = False) -> Panel:
    """The whole run as one panel, problems first: a terminal that is too low cuts the end. ``newest``: of evaluations, the
    newest of each kind."""
    counters = [f"{name} {count}" for name, count in sorted(progress.counters.items()) if count and "/" not in name]
    parts: list[RenderableType] = [
        Text("\n".join(stall_words(stall) for stall in progress.stalls), "bold red"),
        Text(f"  {time_words(progress)}"),
        _policies(progress),
        source_table(progress) if any(sources_in(policy.metrics) for policy in progress.policies) else "",
        Text("\n".join(f"  {line}" for line in warnings_of(progress)), "bold yellow"),
        _replicas(progress),
        Text("\n".join(f"  {wait}" for wait in progress.waits), "yellow"),
        Text(f"  {threshold_words(progress.threshold)}" if progress.HasField("threshold") else ""),
        evaluations_table(progress.evaluations, newest=newest) if progress.evaluations else "",
        time_table(shares_of(progress.accounts)) if progress.accounts else "",
        Text("\n".join(f"  {line}" for line in masked_rollouts(progress.counters)), "yellow"),
        Text(f"  {'  '.join(counters)}" if counters else "", "dim"),
    ]
    return Panel(Group(*(part for part in parts if part)), title=Text(title), subtitle=state_word(progress.state))


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
    """How far the run is from the threshold that ends training, or was at its end."""
    if threshold.reached:
        when = f"after training step {threshold.step}" if threshold.step else "before training"
        return f"threshold reached {when}, {threshold.seconds:.0f} s into the run: {threshold.wanted}"
    newest = f"{threshold.newest:.3f}" if threshold.HasField("newest") else "no evaluation that counts"
    return f"threshold not reached: {threshold.wanted} (newest: {newest})"


def stall_words(stall: run_pb2.Stall) -> str:
    """A stall in words, with the remedy."""
    since = time.strftime("%H:%M:%S", time.localtime(stall.since.ToSeconds()))
    lines = [f"  STALLED since {since}: {stall.component}, {stall.cause.replace('_', ' ')}: {stall.detail}"]
    return "\n".join([*lines, f"    what to do: {stall.advice}"])


def _policies(progress: run_pb2.RunProgress) -> RenderableType:
    table = FittingTable(
        columns("policy | >step | done:1 | >reward | >loss | >staleness:2 | >buffered:4 | >expected:3 | trainer"),
        box=None,
        name_left_out=False,
    )
    for policy in progress.policies:
        step = max(0, policy.version)
        loss = policy.metrics.get(TrainerKey.LOSS.in_row)
        table.add_row(
            *(Text(policy.policy), f"{step}/{policy.num_steps}", _bar(step, policy.num_steps), _reward(policy)),
            *("-" if loss is None else f"{loss:.3g}", f"max {policy.staleness_max}", str(policy.num_buffered)),
            *(str(policy.num_expected), Text(policy.trainer_state)),
        )
    return table


_BAR_WIDTH = 16


def _bar(done: int, whole: int) -> Text:
    """A bar of a fixed width: one that gives way shrinks to a dot."""
    full = round(_BAR_WIDTH * min(done, whole) / whole) if whole else _BAR_WIDTH
    return Text.assemble(("━" * full, "green"), ("─" * (_BAR_WIDTH - full), "dim"))


def _replicas(progress: run_pb2.RunProgress) -> FittingTable:
    table = FittingTable(columns("replica | >rollouts | >tokens/s | versions | >lease"), box=None)
    for replica in progress.replicas:
        table.add_row(
            Text(replica.replica_id + (" (draining)" if replica.draining else "")),  # a peer's word, and no markup
            f"{replica.num_running}/{replica.num_slots}",
            f"{replica.tokens_per_s:,.0f}",
            " ".join(f"{policy}@{version}" for policy, version in sorted(replica.versions.items())),
            f"{replica.lease_left_s:.0f} s",
        )
    return table


def evaluations_table(evaluations: Iterable[run_pb2.EvaluationResult], newest: bool = False) -> FittingTable:
    """Evaluations, or the newest of each kind; ``change`` is that from the evaluation that each is compared with, paired by
    tasks."""
    results = {result.name.partition("/")[2] if newest else result.name: result for result in evaluations}
    table = FittingTable(
        columns("evaluation | dataset | >reward | >95% | >change (95%) | pass@k:1 | >trajectories:3 | >failed"),
        box=None,
    )
    for result in results.values():
        name = result.name + played_by(result.name, result.versions, result.newest_versions)
        if len(result.datasets) > 1:
            counts = (str(result.num_trajectories), str(result.num_failed))
            table.add_row(name, "overall", _mean_reward(result), "", _change(result), "", *counts)
            name = ""
        for found in result.datasets:
            reward, known = found.mean_reward, found.HasField("mean_reward")
            table.add_row(
                *(name, found.name, f"{reward.value:.3f}" if known else "-"),
                f"{reward.low:.3f}-{reward.high:.3f}" if known else "",
                _change(found),
                "  ".join(f"@{passed.k} {passed.share.value:.3f}" for passed in found.pass_at),
                *(str(found.num_items * found.samples_per_item), str(len(found.failed))),
            )
            name = ""
    return table


def _mean_reward(result: run_pb2.EvaluationResult) -> str:
    return format_reward(result.mean_reward if result.HasField("mean_reward") else None)


def _change(scored: run_pb2.EvaluationResult | run_pb2.DatasetScore) -> str:
    """From the first evaluation of the same kind, paired by tasks."""
    found = scored.difference
    return format_change(found.value, found.low, found.high) if scored.HasField("difference") else ""


LOOK_EVERY_S = 5.0
WAITS_EVERY_S = 10.0  # lines of progress while the steps stand still
_WAITING = (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_EVALUATING_START, run_pb2.RUN_STATE_EVALUATING_END)


class Told:
    """Says of each trouble once that it began, and once that it is over."""

    def __init__(self, console: Console, style: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._style = style
        self._clock = clock
        self._due_at = clock() + LOOK_EVERY_S
        self._ends: dict[str, str] = {}

    def is_due(self) -> bool:
        """True once every few seconds, for a loop that turns more often."""
        if self._clock() < self._due_at:
            return False
        self._due_at = self._clock() + LOOK_EVERY_S
        return True

    def tell(self, troubles: Mapping[str, str], end: str) -> None:
        """``troubles``: those of now, by name. ``end``: what is said at the end of one, with ``{}`` for the name."""
        for name in [name for name in self._ends if name not in troubles]:
            say(self._console, self._ends.pop(name), "green")
        for name, words in troubles.items():
            if name not in self._ends:
                say(self._console, words, self._style)  # of peers: brackets in it are no markup
                self._ends[name] = end.format(name)


class StallsTold(Told):
    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, "bold red", clock)

    def stalls(self, stalls: Iterable[run_pb2.Stall]) -> None:
        named = {f"{stall.component}, {stall.cause.replace('_', ' ')}": stall_words(stall) for stall in stalls}
        self.tell(named, "goes on again: {}")

    def ask(self, client: OrchestratorClient) -> None:
        """While a run starts: look at its stalls now and then, as soon as the process of the orchestrator can run."""
        if self.is_due():
            with suppress(InfrastructureError):  # not up yet: the launcher's own deadline names it
                self.stalls(client.get_run().progress.stalls)


class TrackersTold(Told):
    """Reads the positions of a run's trackers, from its directory."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, "bold yellow", clock)
        self._trackers = followed(recipe)
        self._run_dir = run_dir

    def look(self) -> None:
        """Called often; looks every few seconds."""
        if not self._trackers or not self.is_due():
            return
        errors = {tracker: read_position(self._run_dir, tracker).error for tracker in self._trackers}
        down: dict[str, str] = {
            tracker: f"{tracker} does not take metrics ({error}): they are kept and sent later"
            for tracker, error in errors.items()
            if error
        }
        self.tell(down, "{} takes metrics again")

    def at_end(self) -> None:
        """What is left to send, with the command."""
        for tracker in self._trackers:
            if not all_sent(self._run_dir, tracker):
                told = f"{tracker} has not taken all metrics: rollmill track {self._run_dir} sends the rest"
                say(self._console, told, self._style)


class ProgressView:
    """Shows progress on a console until closed."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._last: run_pb2.RunProgress | None = None
        self._last_line = ""
        self._last_waits: list[str] = []
        self._waits_due_at = 0.0
        self._told: set[str] = set()  # warnings by subject, evaluations, and the threshold
        self._stalls = StallsTold(console)
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
            self._live.update(render(progress, self._title, newest=True), refresh=True)
            return
        self._stalls.stalls(progress.stalls)
        for warning in warnings_of(progress):  # once: the numbers behind it change
            self._tell_once(warning.split(maxsplit=1)[0], warning, "bold yellow")
        for result in progress.evaluations:
            change = _change(result)
            told = f", change {change} since {result.compared_with}" if change else ""
            named = result.name + played_by(result.name, result.versions, result.newest_versions)
            failed = f"; {failed_rollouts(result.num_failed, progress.counters)}" if result.num_failed else ""
            opaque = (
                f"; {result.num_opaque} rewards by opaque tests, which programs can forge" if result.num_opaque else ""
            )
            mean = f"{_mean_reward(result)} over {result.num_trajectories}{told}{failed}{opaque}"
            self._tell_once(f"evaluation {named}", f"evaluation {named}: {mean}", "bold yellow" if failed else None)
        if progress.threshold.reached:
            self._tell_once("threshold", threshold_words(progress.threshold))
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

    def _tell_once(self, subject: str, words: str, style: str | None = None) -> None:
        if subject not in self._told:
            self._told.add(subject)
            say(self._console, words, style)


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
    table = Table("component", "where the time went", *[""] * (LARGEST - 1), box=None, header_style="dim")
    table.columns[0].no_wrap = True
    for component, of_one in shares.items():
        if sum(of_one.get(activity, 0.0) for activity in _QUIET) < _QUIET_SHARE:
            cells = [f"{share:.0%} {what}" for what, share in list(of_one.items())[:LARGEST] if share >= LEAST_SHARE]
            table.add_row(*map(Text, (component, *cells)))  # as texts: names are peers', and no markup
    return table


def shares_of(accounts: Iterable[account_pb2.TimeAccount]) -> dict[str, dict[str, float]]:
    """As ``time_table`` takes them."""
    read_accounts = (read(AccountState, account) for account in accounts)
    return {account.component: account.named_shares() for account in read_accounts}


log = structlog.get_logger()

FOLLOW_EVERY_S = 1.0
PATIENCE_S = 300.0  # for an orchestrator that is away: it may be started again
LIMIT_S = 10.0  # longer than a restart, and than the deadline of a call
_STATES = {
    "T": "its process is stopped (SIGSTOP): send it SIGCONT",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk that does not respond",
    "Z": "its process has ended, and its parent has not waited for it",
}


class OrchestratorLiveness:
    """Hears of each answer of the orchestrator; ``stall`` gives the reason once none has come for ``LIMIT_S``."""

    def __init__(
        self,
        address: str,
        pid: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        run_dir: Path | None = None,
    ) -> None:
        """``run_dir``: the directory of the run, if on this machine."""
        self._address = address
        self._pid = pid
        self._clock = clock
        self._run_dir = run_dir
        self._since = clock()

    def answered(self) -> None:
        self._since = self._clock()

    @property
    def silent_s(self) -> float:
        return self._clock() - self._since

    @property
    def stall(self) -> run_pb2.Stall | None:
        seconds = self.silent_s
        if seconds < LIMIT_S:
            return None
        stall = run_pb2.Stall(
            component=components.ORCHESTRATOR,
            cause=Cause.SILENT,
            detail=f"{self._address} has not answered for {seconds:.0f} s: {self._reason()}",
            advice=f"its log shows where it hangs if its event loop is blocked ({LogEvent.LOOP_BLOCKED}); replicas and trainers "
            "keep their data and continue when it is back",
        )
        stall.since.FromNanoseconds(int((time.time() - seconds) * 1e9))
        return stall

    def _reason(self) -> str:
        if self._run_dir is not None and shutil.disk_usage(self._run_dir).free < RESERVE_BYTES:
            return f"the disk of {self._run_dir} is full: free some space, and it continues by itself"
        pid = self._pid()
        if pid is None:
            return "its process, or the network in between, does not respond"
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "its process is gone"
        return _STATES.get(state, "its process is running and does not respond")


def follow(client: OrchestratorClient, view: ProgressView) -> None:
    """Poll about once a second, each call with a deadline: a stream could end without notice when its peer dies.

    Raises ``InfrastructureError`` when the orchestrator has not answered for five minutes.
    """
    liveness = OrchestratorLiveness(client.address)
    while True:
        try:
            if show_now(client, view, liveness):
                return
        except InfrastructureError:
            if liveness.silent_s > PATIENCE_S:
                raise
        time.sleep(FOLLOW_EVERY_S)


def show_now(client: OrchestratorClient, view: ProgressView, liveness: OrchestratorLiveness) -> bool:
    """Show the present state of the run; returns whether the run has ended.

    Raises ``InfrastructureError`` when the orchestrator does not answer, which the view reports once it lasts.
    """
    try:
        progress = client.get_run().progress
    except InfrastructureError as error:
        log.debug("orchestrator.silent", error=error.message)  # being restarted, or leaving
        if (stall := liveness.stall) is not None:
            view.silent(stall)
        raise
    liveness.answered()
    view.show(progress)
    return progress.state in (run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_STOPPED)

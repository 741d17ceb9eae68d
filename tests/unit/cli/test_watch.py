"""What commands print of a run in progress: problems first, each told once, in words that are no markup; tables and plain text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from services.cli import console as drawing
from services.cli.console import Column, FittingTable, say, source_words, tell
from services.cli.inspect.plot import part_lines
from services.cli.watch import (
    RARE_AFTER,
    OrchestratorLiveness,
    ProgressView,
    StallsTold,
    render,
    warnings_of,
)
from services.common.errors import ConfigError, InfrastructureError
from services.common.pb import account_pb2, run_pb2
from services.common.records import RunCount
from services.common.telemetry.metrics import StepKey, source_key
from tests.clock import Clock

# --- progress


def test_damaged_checkpoints_are_told_once_with_the_command_that_lists_them() -> None:
    progress = run_pb2.RunProgress(counters={"damaged_checkpoints": 1, "failed_checkpoints": 2})
    plain = StringIO()
    with ProgressView(Console(file=plain, width=200), "run") as view:
        view.show(progress)
        view.show(progress)
    assert plain.getvalue().count("checkpoints: 1 set aside as damaged (rollmill checkpoints RUN); 2 could not be") == 1


WANTED = "sampled reward at least 0.9, 2 evaluations in a row"


def shown(**progress: Any) -> str:
    console = Console(record=True, width=160, file=StringIO())
    console.print(render(run_pb2.RunProgress(**progress), "run"))
    return console.export_text()


def test_the_threshold_is_told_once_when_it_is_reached() -> None:
    output = StringIO()
    reached = run_pb2.Threshold(wanted=WANTED, newest=0.92, reached=True, step=30, seconds=61.4)
    progress = run_pb2.RunProgress(threshold=reached)
    with ProgressView(Console(file=output, width=200), title="run") as view:
        view.show(run_pb2.RunProgress(threshold=run_pb2.Threshold(wanted=WANTED, newest=0.8)))
        view.show(progress)
        view.show(progress)
    assert output.getvalue().count("threshold reached after training step 30, 61 s into the run") == 1
    assert "before training" in shown(threshold=run_pb2.Threshold(wanted=WANTED, newest=1.0, reached=True, seconds=2.0))


def busy(num_stalls: int = 0) -> run_pb2.RunProgress:
    """A run with much to show."""
    progress = run_pb2.RunProgress(state=run_pb2.RUN_STATE_TRAINING, tokens_per_s=4313.0)
    progress.started_at.FromSeconds(1_000_000)
    progress.at.FromSeconds(1_000_754)
    metrics = {"rollout_reward_mean": 0.61, "trainer/loss": -0.0231, "elapsed_s": 740.0}
    progress.policies.add(
        policy="model0", version=37, num_steps=74, metrics=metrics, trainer_state="waiting for a batch"
    )
    for name in "abcdefgh":
        progress.replicas.add(replica_id=name, num_slots=64, num_running=61, versions={"model0": 37})
        account = progress.accounts.add(component=f"replica/{name}")
        account.activities.add(activity="generating", on="engine/model0", seconds=50.0)
        account.activities.add(activity="waiting for reward", on="envgateway", seconds=50.0)
    for number in range(num_stalls):
        progress.stalls.add(
            component=f"replica/{number}", cause="silent", detail="no report for 16 s", advice="look " * 40
        )
    progress.counters["issued"] = 3000
    return progress


def test_a_low_terminal_shows_problems_and_progress_first() -> None:
    output = StringIO()
    with ProgressView(Console(file=output, width=80, height=24, force_terminal=True), "run [red]") as view:
        view.show(busy(1))
        told = output.getvalue()
    lines = told.splitlines()
    assert "STALLED" in told and "replica/0, silent" in told and "..." in lines[-1]
    assert "12:34 elapsed, about 12:20 left" in told
    assert "-0.0231" in told and "0.610" in told and "37/74" in told and "issued 3000" not in told
    whole = Console(record=True, width=80, file=StringIO())
    whole.print(render(busy(1), "run"))
    assert "issued 3000" in (text := whole.export_text()) and "where the time went" in text


def test_an_evaluation_is_followed_line_by_line_where_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("services.cli.watch.time.monotonic", lambda: now)
    plain = StringIO()
    with ProgressView(Console(file=plain, width=200), "run") as view:
        for second in range(180):
            now = 1000.0 + second
            told = f"evaluation start/greedy: {second // 4} of 50, about {180 - second} s left"
            view.show(run_pb2.RunProgress(state=run_pb2.RUN_STATE_EVALUATING_START, waits=[told]))
    lines = plain.getvalue().splitlines()
    assert 15 <= sum("evaluation start/greedy: " in line for line in lines) <= 20
    assert "evaluation start/greedy: 5 of 50, about 160 s left" in lines


@pytest.mark.parametrize(
    ("kept", "equal", "warns"),
    [(0, RARE_AFTER - 8, False), (0, RARE_AFTER, True), (12, 588, True), (200, 400, False), (0, 0, False)],
)
def test_rare_success_is_told_with_its_share(kept: int, equal: int, warns: bool) -> None:
    counters = {RunCount.SEQUENCES_KEPT: kept, RunCount.SEQUENCES_EQUAL_REWARDS: equal}
    told = warnings_of(run_pb2.RunProgress(counters=counters))
    assert len(told) == warns
    assert not warns or f"{kept} of {kept + equal} sequences ({kept / (kept + equal):.0%})" in told[0]


TRAINING, PAUSED = run_pb2.RUN_STATE_TRAINING, run_pb2.RUN_STATE_PAUSED


@pytest.mark.parametrize(
    ("before", "now", "itself"),
    [
        ((TRAINING, 0), (PAUSED, 1), True),
        ((TRAINING, 0), (PAUSED, 0), False),  # of a person, or one that the run ends by itself
        ((PAUSED, 0), (PAUSED, 1), True),  # the run has waited for long enough
        ((PAUSED, 1), (TRAINING, 1), False),
    ],
)
@pytest.mark.parametrize("cause", ["all_fail", "masked"])
def test_only_a_pause_that_a_run_makes_itself_and_a_person_ends_is_told_as_one(
    before: tuple[run_pb2.RunState.ValueType, int],
    now: tuple[run_pb2.RunState.ValueType, int],
    itself: bool,
    cause: str,
) -> None:
    stalls = [run_pb2.Stall(cause="silent", detail="the gateway"), run_pb2.Stall(cause=cause, detail="the reason")]
    with ProgressView(Console(file=StringIO()), "run") as view:
        assert view.paused_itself == ""
        for state, count in (before, now):
            counters = {RunCount.PAUSES_FOR_FAILURES.value: count}
            view.show(run_pb2.RunProgress(state=state, stalls=stalls, counters=counters))
        assert view.paused_itself == ("the reason" if itself else "")


# --- stalls


STALL = run_pb2.Stall(
    component="envgateway",
    cause="silent",
    detail="no component has reached it for 12 s",
    advice="start it again",
)


def test_what_peers_say_is_no_markup() -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=False, width=200)
    stall = run_pb2.Stall(component="replica/[/a]", cause="stuck", detail="no answer from [fd00::7]:50080 [/tmp/x]")
    account = account_pb2.TimeAccount(
        component="replica/[/a]", activities=[account_pb2.ActivityTime(activity="calling [fd00::8]", seconds=1.0)]
    )
    replica = run_pb2.ReplicaProgress(replica_id="[/a]")
    progress = run_pb2.RunProgress(stalls=[stall], accounts=[account], replicas=[replica], waits=["for [/b]"])
    with ProgressView(console, "run") as view:
        view.show(progress)
    console.print(render(progress, "run"))
    for words in ("replica/[/a]", "[fd00::7]:50080 [/tmp/x]", "calling [fd00::8]", "for [/b]"):
        assert words in output.getvalue()


def test_an_orchestrator_that_does_not_answer_is_named_after_ten_seconds_and_not_while_it_restarts() -> None:
    clock = Clock()
    liveness = OrchestratorLiveness("127.0.0.1:1", clock=clock)
    clock.now = 9.0
    assert liveness.stall is None
    clock.now = 11.0
    assert liveness.stall is not None
    assert (liveness.stall.component, liveness.stall.cause) == ("orchestrator", "silent")
    liveness.answered()
    assert liveness.stall is None


def test_a_stopped_process_is_told_as_such() -> None:
    clock = Clock()
    process = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        liveness = OrchestratorLiveness("127.0.0.1:1", pid=lambda: process.pid, clock=clock)
        clock.now = 11.0
        assert liveness.stall is not None
        assert "SIGCONT" in liveness.stall.detail
    finally:
        process.kill()
        process.wait()


class Answers:
    """An orchestrator that is not up at first, and then has a stall."""

    asked = 0

    def get_run(self) -> run_pb2.GetRunResponse:
        self.asked += 1
        if self.asked == 1:
            raise InfrastructureError("nobody answers")
        return run_pb2.GetRunResponse(progress=run_pb2.RunProgress(stalls=[STALL] if self.asked < 4 else []))


def test_a_stall_is_told_once_while_the_run_still_starts_with_its_advice_and_its_end() -> None:
    output, clock, answers = StringIO(), Clock(), Answers()
    told = StallsTold(Console(file=output, width=200), clock)
    told.ask(answers)  # type: ignore[arg-type]
    assert answers.asked == 0  # not at once: most runs are ready before
    for _ in range(4):
        clock.now += 6.0
        for _ in range(2):
            told.ask(answers)  # type: ignore[arg-type]
    assert answers.asked == 4
    text = output.getvalue()
    assert text.count("STALLED") == 1 and "goes on again: envgateway, silent" in text
    assert "envgateway, silent: no component has reached" in text and "start it again" in text


# --- tables, pictures and plain text


def drawn(table: FittingTable, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def groups() -> FittingTable:
    table = FittingTable(
        [Column("group"), Column("task", spare=1), Column("took", "right"), Column("retries", spare=2)]
    )
    table.add_row("c8f8e1-00004413", "98-plus-80", "1.04 s", "0")
    return table


def test_what_matters_least_goes_first_and_is_named_with_the_width_that_shows_it() -> None:
    text, narrower = drawn(groups(), 44), drawn(groups(), 32)
    assert "c8f8e1-00004413" in text and "98-plus-80" in text and "no room here for: retries" in text
    assert "c8f8e1-00004413" in narrower and "1.04 s" in narrower and "98-plus-80" not in narrower
    assert "no room here for: task, retries" in narrower.replace("\n", " ")
    width = int(text.partition("COLUMNS=")[2].split()[0])
    assert "retries" not in drawn(groups(), width - 1).partition("no room")[0]
    assert "no room" not in drawn(groups(), width)


def test_nothing_ends_for_want_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(file=io.StringIO(), width=200)
    assert drawing.drawn(drawing.pyplot, console) is None
    assert "no picture: a picture needs the package matplotlib" in console.file.getvalue()  # type: ignore[attr-defined]


# --- plain text


@pytest.mark.parametrize(
    "text", ["runs/[bold]x[/bold]: [1, 2]", "[/]", "[link=file:///etc]a[/link]", "a " * 200 + "b", ""]
)
def test_a_text_is_printed_as_it_is_in_one_line(text: str) -> None:
    console = Console(record=True, width=40, force_terminal=True)
    say(console, text, "bold red")
    assert console.export_text() == f"{text}\n"


def test_the_text_of_an_error_controls_no_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)
    tell(ConfigError("recipe.yaml cannot run:\n  ru\x1b[2Jn\u202ex: no such setting"), console)
    assert written.getvalue() == "error: recipe.yaml cannot run:\n  ru\\x1b[2Jn\\x202ex: no such setting\n"


# --- sources of a mixture

ROW = {
    source_key(source, key): value
    for source, share in {"maths": 0.34, "code": 0.66}.items()
    for key, value in {
        StepKey.SHARE: share, StepKey.WANTED_SHARE: 1 / 3 if source == "maths" else 2 / 3, StepKey.STALENESS_MAX: 2.0
    }.items()
} | {source_key("code", StepKey.ROLLOUT_REWARD_MEAN): 0.125}  # fmt: skip


def test_watch_shows_a_line_for_each_source_with_share_reward_and_staleness() -> None:
    text = shown(policies=[run_pb2.PolicyProgress(policy="model0", version=3, num_steps=9, metrics=ROW)])
    (code,) = [line.split() for line in text.splitlines() if " code " in line]
    (maths,) = [line.split() for line in text.splitlines() if " maths " in line]
    assert code[1:7] == ["code", "66.0%", "66.7%", "0.125", "≤", "2"]
    assert maths[1:5] == ["maths", "34.0%", "33.3%", "-"], "no rollout finished since the batch before"


def test_sources_are_told_of_each_policy_in_the_line_and_in_the_picture() -> None:
    row = ROW | {source_key("maths", StepKey.BATCH_REWARD_MEAN): 0.25}
    assert "(wanted 33.3%), batch reward 0.250" in source_words(row), "no rollout ended since the batch before"
    assert "(wanted 66.7%), reward 0.125" in source_words(row)
    text = shown(policies=[run_pb2.PolicyProgress(policy=name, metrics=ROW) for name in ("a", "b")])
    assert "a/code" in text and "b/maths" in text
    assert [line.label for line in part_lines([[{"step": 1, **ROW}]])] == ["source maths", "source code"]
    alone = {"rollout_reward_mean": 0.5}
    assert "wanted" not in shown(policies=[run_pb2.PolicyProgress(policy="model0", metrics=alone)])
    assert source_words(alone) == ""

"""Reports of stalls for people: in plain words, once, with the end; and of an orchestrator that does not answer."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from rich.console import Console

from services.cli.watch import OrchestratorLiveness, ProgressView, StallsAtStart, StallsTold, render
from services.common.errors import InfrastructureError
from services.common.pb import account_pb2, run_pb2
from tests.clock import Clock

STALL = run_pb2.Stall(
    component="envgateway",
    cause="silent",
    detail="no component has reached it for 12 s",
    advice="start it again",
)


def test_a_stall_is_told_once_with_its_advice_and_its_end() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, width=200), "run") as view:
        for _ in range(3):
            view.show(run_pb2.RunProgress(stalls=[STALL]))
        view.show(run_pb2.RunProgress())
    text = output.getvalue()
    assert text.count("STALLED") == 1
    for words in (
        "envgateway, silent",
        "no component has reached",
        "start it again",
        "goes on again",
    ):
        assert words in text


def test_what_peers_say_is_no_markup() -> None:
    output = io.StringIO()
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

    def __init__(self) -> None:
        self.asked = 0

    def get_run(self) -> run_pb2.GetRunResponse:
        self.asked += 1
        if self.asked == 1:
            raise InfrastructureError("nobody answers")
        return run_pb2.GetRunResponse(progress=run_pb2.RunProgress(stalls=[STALL] if self.asked < 4 else []))


def test_a_stall_is_told_while_the_run_still_starts() -> None:
    output, clock, answers = io.StringIO(), Clock(), Answers()
    ask = StallsAtStart(answers, StallsTold(Console(file=output, width=200)), clock)  # type: ignore[arg-type]
    ask()
    assert answers.asked == 0  # not at once: most runs are ready before
    for _ in range(4):
        clock.now += 6.0
        ask()
        ask()
    assert answers.asked == 4
    assert output.getvalue().count("STALLED") == 1
    assert "goes on again: envgateway, silent" in output.getvalue()

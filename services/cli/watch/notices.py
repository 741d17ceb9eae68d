"""Lines that the launcher prints beside the progress of a run, once for each change.

* stalls while a run starts: with a full disk the run never becomes ready, and only the orchestrator knows the reason
* a tracker that stops taking rows, one that takes rows again, and the unsent rows at the end
* a stall of the orchestrator without answers; the orchestrator reports the stalls of all others itself
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from rich.console import Console

from services.cli.console import say
from services.cli.watch.orchestrator_client import OrchestratorClient
from services.cli.watch.progress_view import ProgressView, StallsTold
from services.common.config.recipe import Recipe
from services.common.errors import InfrastructureError
from services.common.pb import run_pb2
from services.common.system.disk import RESERVE_BYTES
from services.common.telemetry.components import ORCHESTRATOR
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.stalls.facts import Cause
from services.orchestrator.trackers.follower import all_sent, read_position
from services.orchestrator.trackers.process import followed

log = structlog.get_logger()

LOOK_EVERY_S = 5.0
FOLLOW_EVERY_S = 1.0
PATIENCE_S = 300.0  # for an orchestrator that is away: it may be started again
LIMIT_S = 10.0  # longer than a restart, and than the deadline of a call
_STATES = {
    "T": "its process is stopped (SIGSTOP): send it SIGCONT",
    "t": "its process is held by a debugger",
    "D": "its process waits for a disk that does not respond",
    "Z": "its process has ended, and its parent has not waited for it",
}


class StallsAtStart:
    """Polls the orchestrator at intervals, as soon as its process can run, and reports its stalls."""

    def __init__(
        self, client: OrchestratorClient, told: StallsTold, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._told = told
        self._clock = clock
        self._ask_at = clock() + LOOK_EVERY_S

    def __call__(self) -> None:
        if self._clock() < self._ask_at:
            return
        try:
            stalls = self._client.get_run().progress.stalls
        except InfrastructureError:
            pass  # not up yet: the launcher's own deadline names it
        else:
            self._told.tell(stalls)
        self._ask_at = self._clock() + LOOK_EVERY_S


class TrackersTold:
    """Reads the positions of a run's trackers, from its directory."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trackers = followed(recipe)
        self._run_dir = run_dir
        self._console = console
        self._clock = clock
        self._look_at = clock() + LOOK_EVERY_S
        self._down: set[str] = set()

    def look(self) -> None:
        """Called often; looks every few seconds."""
        if not self._trackers or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_EVERY_S
        for tracker in self._trackers:
            error = read_position(self._run_dir, tracker).error
            if error and tracker not in self._down:
                self._down.add(tracker)
                say(
                    self._console,
                    f"{tracker} does not take metrics ({error}): they are kept and sent later",
                    "bold yellow",
                )
            elif not error and tracker in self._down:
                self._down.remove(tracker)
                say(self._console, f"{tracker} takes metrics again", "green")

    def at_end(self) -> None:
        """What is left to send, with the command."""
        for tracker in self._trackers:
            if not all_sent(self._run_dir, tracker):
                say(
                    self._console,
                    f"{tracker} has not taken all metrics: rollmill track {self._run_dir} sends the rest",
                    "bold yellow",
                )


class OrchestratorLiveness:
    """Takes the result of each call to the orchestrator; ``stall`` gives the reason once calls have failed for ``LIMIT_S``."""

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
        self._silent = False

    def answered(self) -> None:
        self._since = self._clock()
        self._silent = False

    def missed(self) -> None:
        self._silent = True

    @property
    def stall(self) -> run_pb2.Stall | None:
        seconds = self._clock() - self._since
        if not self._silent or seconds < LIMIT_S:
            return None
        stall = run_pb2.Stall(
            component=ORCHESTRATOR,
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
    heard_at = time.monotonic()
    while True:
        try:
            if show_now(client, view, liveness):
                return
            heard_at = time.monotonic()
        except InfrastructureError:
            if time.monotonic() - heard_at > PATIENCE_S:
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
        liveness.missed()
        if (stall := liveness.stall) is not None:
            view.silent(stall)
        raise
    liveness.answered()
    view.show(progress)
    return progress.state in (run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_STOPPED)

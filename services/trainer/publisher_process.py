"""The trainer's handle on its publisher process: start, announce snapshots, start again when it died.

    announce -> [lives: tell it] -> done
                [dead, or dies, or is silent meanwhile] -> kill -> pause -> start, tell it all it served -> done, or again

It is looked after between announcements too: where replicas must hold the newest version to play, the trainer's next
batch, and with it the next announcement, depends on this process. One that failed in the middle of a conversation is
killed, so that no late answer is taken for the answer to something else.
Started before anything heavy, with plain pipes: nothing forks after torch or gRPC is up, but to start it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from services.common.aio import backoff
from services.common.config.policy import WeightsConfig
from services.common.config.services import MetricsConfig
from services.common.errors import DeadlineError, InfrastructureError
from services.common.hosts import host_and_port
from services.common.process import DIE_WITH_PARENT

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
ANNOUNCE_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
PATIENCE_S = 300.0  # for a publisher that dies or is silent again and again, before its trainer is told
LOOK_S = 1.0  # how soon one that died between two announcements is noticed


class _PublisherGoneError(InfrastructureError):
    """It ended or fell silent in the middle of a conversation, or did not start; another one may do better."""


class PublisherProcess:
    """One publisher, restarted on the same address when it dies; it is then told again what it served."""

    def __init__(
        self,
        *,
        run_id: str,
        policy: str,
        config: WeightsConfig,
        run_dir: Path | None = None,
        host: str | None = None,
        metrics: MetricsConfig | None = None,
    ) -> None:
        self._arguments = [f"--run-id={run_id}", f"--policy={policy}", f"--weights={config.model_dump_json()}"]
        self._arguments += [f"--host={host}"] if host is not None else []
        self._arguments += [f"--run-dir={run_dir}"] if run_dir is not None else []
        self._arguments += [f"--metrics={metrics.model_dump_json()}"] if metrics is not None else []
        self._port = config.port
        self._keep = config.keep_versions
        self._announced: list[Path] = []  # oldest first; what the publisher no longer keeps goes when its file is gone
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._lock = threading.Lock()  # one conversation with the process at a time
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self.address = ""

    def start(self) -> None:
        """Start and learn the address; raises ``InfrastructureError`` with the publisher's own words."""
        with self._lock:
            self._start()
        self._watcher = threading.Thread(target=self._watch, name="publisher.watch", daemon=True)
        self._watcher.start()

    def announce(self, path: Path) -> None:
        """Make a sealed snapshot fetchable; starts the publisher again, as often as it takes, when it has died.

        Raises:
            InfrastructureError: the publisher refuses the snapshot, or none has stayed alive for ``PATIENCE_S``.
        """
        with self._lock:
            self._announced = [*(known for known in self._announced if known != path and known.exists()), path]
            until = time.monotonic() + PATIENCE_S
            for delay in backoff(0.1, 5.0):
                try:
                    if self._process is not None and self._process.poll() is None:
                        self._add(path)
                    else:
                        self._start_again()
                    return
                except _PublisherGoneError as error:
                    log.warning("publisher.lost", error=error.message, snapshot=path.name)
                    if time.monotonic() > until:
                        raise InfrastructureError(
                            f"no weight publisher could be told of {path.name} within {PATIENCE_S:g} s: {error.message}"
                        ) from error
                self._stopping.wait(delay)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is None:
                return
            self._close_pipes()  # the publisher ends at the end of its input
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        """Without a deadline: until ``stop``. A publisher that this thread has started ends with it, by the kernel."""
        while not self._stopping.wait(LOOK_S):
            with self._lock:
                if self._stopping.is_set() or self._process is None or self._process.poll() is None:
                    continue
                try:
                    self._start_again()
                except (InfrastructureError, OSError) as error:
                    log.error("publisher.not_restarted", error=str(error), retry_s=LOOK_S)

    def _start_again(self) -> None:
        """It is then told again what it served."""
        log.warning("publisher.restarted", exit_code=self._process.poll() if self._process else None)
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT_S)  # one that was killed holds the port until it is gone
            except subprocess.TimeoutExpired:
                raise _PublisherGoneError("the publisher was killed and the kernel has not ended it yet") from None
        self._start()
        self._announced = [known for known in self._announced if known.exists()]
        for left in self._announced[: -self._keep]:  # the one that died would have removed it after its last reader
            left.unlink(missing_ok=True)
        for kept in self._announced[-self._keep :]:
            self._add(kept)

    def _start(self) -> None:
        self._buffer = b""
        self._close_pipes()  # of one that died
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer.publisher", *self._arguments, f"--port={self._port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, DIE_WITH_PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:  # no process or memory to be had at this moment
            raise _PublisherGoneError(f"the publisher could not be started: {error}") from error
        try:
            self.address = str(self._ask("the publisher's start", START_TIMEOUT_S)["address"])
        except InfrastructureError as error:  # also its own word, such as that its port is not free yet
            raise _PublisherGoneError(f"{error.message}; its log says more") from None
        _, self._port = host_and_port(self.address)  # replicas know this one: keep it over restarts

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # closing flushes; nobody is left to read
                    pipe.close()

    def _add(self, path: Path) -> None:
        self._ask(f"the publisher's answer about {path.name}", ANNOUNCE_TIMEOUT_S, {"add": str(path)})

    def _ask(self, wait: str, timeout_s: float, question: dict[str, str] | None = None) -> dict[str, Any]:
        """Its answer. Raises ``_PublisherGoneError`` once it is dead, ``InfrastructureError`` with its own words."""
        assert self._process is not None and self._process.stdin is not None
        try:
            if question is not None:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
            answer = self._read(wait, timeout_s)
        except (BrokenPipeError, EOFError, DeadlineError) as error:  # it died, or is frozen while replicas wait
            self._process.kill()
            words = error.message if isinstance(error, DeadlineError) else f"the publisher ended during {wait}"
            raise _PublisherGoneError(words) from error
        if "error" in answer:
            raise InfrastructureError(f"weight publisher: {answer['error']}")
        return answer

    def _read(self, wait: str, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait)
            data = os.read(descriptor, 65536)
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

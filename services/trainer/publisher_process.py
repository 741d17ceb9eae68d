"""The trainer's handle on its publisher process: start, announce snapshots, start again when it died.

It is looked after between announcements too: where replicas must hold the newest version to play, the trainer's next
batch, and with it the next announcement, depends on this process.
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

from services.common.config.policy import WeightsConfig
from services.common.config.services import MetricsConfig
from services.common.errors import DeadlineError, InfrastructureError, MillraceError
from services.common.hosts import host_and_port
from services.common.process import DIE_WITH_PARENT

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
ANNOUNCE_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
LOOK_S = 1.0  # how soon one that died between two announcements is noticed


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
        """Make a sealed snapshot fetchable; starts the publisher again first when it has died."""
        with self._lock:
            self._announced = [*(known for known in self._announced if known != path and known.exists()), path]
            if self._process is not None and self._process.poll() is None:
                try:
                    self._add(path)
                    return
                except (BrokenPipeError, EOFError):
                    pass  # it died between the look and the word
                except DeadlineError as error:
                    log.warning("publisher.killed", error=error.message)
                    self._process.kill()  # frozen: replicas wait for this version
            self._start_again()

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
                except (MillraceError, OSError, EOFError) as error:
                    log.error("publisher.not_restarted", error=str(error), retry_s=LOOK_S)

    def _start_again(self) -> None:
        """It is then told again what it served."""
        log.warning("publisher.restarted", exit_code=self._process.poll() if self._process else None)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)  # one that was killed holds the port until it is gone
        self._start()
        self._announced = [known for known in self._announced if known.exists()]
        for left in self._announced[: -self._keep]:  # the one that died would have removed it after its last reader
            left.unlink(missing_ok=True)
        for kept in self._announced[-self._keep :]:
            self._add(kept)

    def _start(self) -> None:
        self._buffer = b""
        self._close_pipes()  # of one that died
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.trainer.publisher", *self._arguments, f"--port={self._port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
        )
        try:
            self.address = str(self._read("the publisher's start", START_TIMEOUT_S)["address"])
        except EOFError as error:
            raise InfrastructureError(f"{error}; its log says why") from None
        _, self._port = host_and_port(self.address)  # replicas know this one: keep it over restarts

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # closing flushes; nobody is left to read
                    pipe.close()

    def _add(self, path: Path) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"add": str(path)}).encode() + b"\n")
        self._process.stdin.flush()
        self._read(f"the publisher's answer about {path.name}", ANNOUNCE_TIMEOUT_S)

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
                raise EOFError(f"the publisher ended during {wait}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InfrastructureError(f"weight publisher: {answer['error']}")
        return answer

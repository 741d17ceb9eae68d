"""Starts the trainer's publisher process, announces snapshots to the publisher, and restarts a dead publisher.

    announce -> [alive: send the path] -> done
                [dead, dies, or does not answer] -> kill -> pause -> start, send all kept paths -> done, or repeat

A thread also checks the process between announcements: if replicas need the newest version for new rollouts, the
trainer's next batch, and so the next announcement, depends on the publisher. A publisher that fails during an exchange
is killed, so that a late answer is never matched to a later question.
The first start is before the import of torch and gRPC, with plain pipes: only a restart forks later.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import structlog

from services.common.aio import backoff
from services.common.config.processes import MetricsConfig
from services.common.config.training import WeightsConfig
from services.common.errors import InfrastructureError
from services.common.net.hosts import host_and_port
from services.common.system.child import module_command
from services.common.system.processes import AnsweringChild, ChildLostError

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
ANNOUNCE_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
RESTART_TIMEOUT_S = 300.0  # of repeated restarts, before the trainer gets the error
LOOK_S = 1.0  # interval of the check between announcements


class PublisherProcess:
    """One publisher process, restarted on the same address with the same snapshots after its death."""

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
        self._announced: list[Path] = []  # oldest first; a path is dropped when the publisher has removed its file
        self._process: AnsweringChild | None = None
        self._lock = threading.Lock()  # one exchange with the process at a time
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self.address = ""

    @property
    def pid(self) -> int | None:
        """None before ``start``."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start and read the address; raises ``InfrastructureError`` with the publisher's message."""
        with self._lock:
            self._start()
        self._watcher = threading.Thread(target=self._watch, name="publisher.watch", daemon=True)
        self._watcher.start()

    def announce(self, path: Path) -> None:
        """Announce a sealed snapshot; restarts a dead publisher until the announcement succeeds.

        Raises:
            InfrastructureError: the publisher refuses the snapshot, or restarts have failed for ``RESTART_TIMEOUT_S``.
        """
        with self._lock:
            self._announced = [*(known for known in self._announced if known != path and known.exists()), path]
            until = time.monotonic() + RESTART_TIMEOUT_S
            for delay in backoff(0.1, 5.0):
                try:
                    if self._process is not None and self._process.poll() is None:
                        self._ask(f"the publisher's answer about {path.name}", ANNOUNCE_TIMEOUT_S, {"add": str(path)})
                    else:
                        self._start_again()
                    return
                except ChildLostError as error:
                    log.warning("publisher.lost", error=error.message, snapshot=path.name)
                    if time.monotonic() > until:
                        raise InfrastructureError(
                            f"no weight publisher accepted {path.name} within {RESTART_TIMEOUT_S:g} s: {error.message}"
                        ) from error
                self._stopping.wait(delay)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._process is None:
                return
            self._process.close(STOP_TIMEOUT_S)  # the publisher ends at the end of its input
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        """Restart a dead publisher, until ``stop``. The kernel ends a publisher with the thread that started the process."""
        while not self._stopping.wait(LOOK_S):
            with self._lock:
                if self._stopping.is_set() or self._process is None or self._process.poll() is None:
                    continue
                try:
                    self._start_again()
                except (InfrastructureError, OSError) as error:
                    log.error("publisher.not_restarted", error=str(error), retry_s=LOOK_S)

    def _start_again(self) -> None:
        """Start a new process, and announce the kept snapshots again."""
        log.warning("publisher.restarted", exit_code=self._process.poll() if self._process else None)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)  # a killed process holds the port until its end
            self._process.close()
        self._start()
        self._announced = [known for known in self._announced if known.exists()]
        for left in self._announced[: -self._keep]:  # the dead publisher cannot remove these any more
            left.unlink(missing_ok=True)
        for kept in self._announced[-self._keep :]:
            self._ask(f"the publisher's answer about {kept.name}", ANNOUNCE_TIMEOUT_S, {"add": str(kept)})

    def _start(self) -> None:
        self._process = AnsweringChild(
            "the publisher",
            module_command("services.trainer.publisher", *self._arguments, f"--port={self._port}"),
        )
        try:
            self.address = str(self._ask("the publisher's start", START_TIMEOUT_S)["address"])
        except InfrastructureError as error:  # also the publisher's own error, such as a port in use
            raise ChildLostError(f"{error.message}; its log says more") from None
        _, self._port = host_and_port(self.address)  # replicas know this port: keep the same after restarts

    def _ask(self, wait: str, timeout_s: float, question: dict[str, str] | None = None) -> dict[str, Any]:
        """Send a question and read the publisher's answer.

        Raises:
            ChildLostError: the publisher is dead or does not answer.
            InfrastructureError: the publisher answers with an error, whose message this error has.
        """
        assert self._process is not None
        answer = self._process.ask(wait, timeout_s, question)
        if "error" in answer:
            raise InfrastructureError(f"weight publisher: {answer['error']}")
        return answer

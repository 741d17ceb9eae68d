"""Logs: events with fields, readable on a terminal, JSON lines in the run directory.

``log.info("batch.ready", step=7)``: machines count events, so their names are stable. Ids bound with ``bind`` (run,
step, policy, task group) are on every later event of the same task. Secrets are not written: run
tokens, bearer headers, private keys, passwords in addresses.
"""

from __future__ import annotations

import enum
import io
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from services.common import run_files

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MOST_CHARACTERS = 2000  # of one value
# Control characters, directions of writing, and halves of surrogate pairs, which no file takes.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_JSON = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
HIDDEN = "[hidden]"
TELL_AGAIN_S = 1.0

# Only texts with one of these are searched: most have none.
_HINTS = ("eyJ", "earer ", "PRIVATE KEY", "uthorization", "@")
_PASSWORD = re.compile(r"(?<=[a-z0-9+.-]://)[^/@\s\"']*+@")
_SECRETS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL), HIDDEN),
    (re.compile(r"eyJ[\w-]{8,}(?:\.[\w-]*){0,2}(?:~[\w-]+)?"), HIDDEN),  # a JWT, and the session that may follow it
    (re.compile(r"(\b[Bb]earer )[^\s\"'\\,)\]}]+"), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"([\"']?[Aa]uthorization[\"']?\s*[:=,]\s*[\"']?(?:[Bb]asic )?)(?![Bb]earer |[Bb]asic )[^\s\"'\\,)\]}]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (_PASSWORD, f"{HIDDEN}@"),
)


def without_passwords(tree: Any) -> Any:
    """Settings for display: user and password of every address are hidden, at any depth."""
    if isinstance(tree, dict):
        return {key: without_passwords(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_passwords(value) for value in tree]
    return _PASSWORD.sub(f"{HIDDEN}@", tree) if isinstance(tree, str) else tree


def redacted(text: str) -> str:
    """The text with ``[hidden]`` in place of every secret that is recognised by its form."""
    if not any(hint in text for hint in _HINTS):
        return text
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def configure(service: str, run_dir: Path | None = None, instance: str | None = None, level: str = "info") -> None:
    """Send events to standard error and, with a run directory, to ``logs/<instance or service>.jsonl``.

    The launcher's terminal belongs to its live view, so the terminal gets warnings and errors only.
    """
    global _sink
    close()
    name = instance or service
    file: BinaryIO | None = None
    if run_dir is not None:
        run_files.logs(run_dir).mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line is one write, so lines of several threads do not mix and a killed process loses none.
        file = (run_files.logs(run_dir) / f"{name}.jsonl").open("ab", buffering=0)
    console_level = _LEVELS["warning" if service == "launcher" else level]
    _sink = _Sink(file, {"service": service, "instance": name}, console_level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _tamed,
            _sink,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_LibraryHandler()], level=logging.WARNING, force=True)


def quiet_grpc() -> None:
    """Limit grpc's own log to errors: we log failures ourselves, and handshakes of unknown clients could fill the disk.

    Call this before the import of grpc, which reads the variable.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def close() -> None:
    """Close the file; later events go to the terminal only."""
    if _sink is not None:
        _sink.close()


def bind(**ids: Any) -> None:
    """Put ids on every later event of this task. ``run`` and ``request`` also travel with every call."""
    structlog.contextvars.bind_contextvars(**ids)


def escaped(text: str) -> str:
    """The text with control characters and marks of direction escaped, so that it does not control a terminal."""
    return OBEYED.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _tamed(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Sanitise values, which may come from a peer: cut, without terminal control sequences and without lines that look
    like events."""
    for name, value in event.items():
        if not isinstance(value, str):
            continue
        if name != "exception" and len(value) > MOST_CHARACTERS:
            value = f"{value[:MOST_CHARACTERS]}... ({len(value)} characters)"
        if not value.isprintable():
            value = escaped(value)
            if name != "exception":
                value = value.replace("\n", "\n    ")
        event[name] = value
    return event


class _Sink:
    """The last processor: one JSON line to the file, one readable line to standard error, which a launcher may have pointed
    at a file on a disk that is full. Nothing is left for a logger of structlog."""

    def __init__(self, file: BinaryIO | None, identity: dict[str, str], console_level: int) -> None:
        self._file = file
        self._identity = identity
        self._console_level = console_level
        self._render = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        if self._file is not None:
            try:
                line = orjson.dumps({**self._identity, **event}, default=str, option=_JSON)
                self._file.write(redacted(line.decode()).encode())
            except OSError:
                pass  # a full disk must not stop a service; the terminal still gets the event
        if _LEVELS.get(method, 40) >= self._console_level:
            try:
                sys.stderr.write(redacted(str(self._render(logger, method, event))) + "\n")
                sys.stderr.flush()
            except OSError:
                pass  # no log is left for the error, and a service must not end because of it
        raise structlog.DropEvent

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_sink: _Sink | None = None  # the one that is configured


class _LibraryHandler(logging.Handler):
    """Turns records of ``logging`` from libraries into events, so that the log file has all messages."""

    def emit(self, record: logging.LogRecord) -> None:
        method = "error" if record.levelno >= logging.ERROR else "warning"
        getattr(structlog.get_logger(), method)(
            "library.log", logger=record.name, message=record.getMessage(), exc_info=record.exc_info or None
        )


class Repeats:
    """Limits the rate of logged events, so that a client cannot fill the disk: one event per kind and second, or another
    period. Kinds are kept for ever, so they must come from a bounded set, never from a peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, every_s: float = TELL_AGAIN_S) -> None:
        self._clock = clock
        self._every_s = every_s
        self._told: dict[tuple[str, ...], float] = {}
        self._untold: Counter[tuple[str, ...]] = Counter()

    def tell(self, *kind: str) -> dict[str, int] | None:
        """None: keep quiet about this one. Otherwise fields for its log line: how many of its kind were kept quiet."""
        now = self._clock()
        if kind in self._told and now - self._told[kind] < self._every_s:
            self._untold[kind] += 1
            return None
        self._told[kind] = now
        return {"and_before": count} if (count := self._untold.pop(kind, 0)) else {}


# --- Names of log events that tools read. Other events are for people only and are plain strings where they are logged.


class LogEvent(enum.StrEnum):
    RECORD_DROPPED = "record.dropped"  # outcome, task_group, index, replica
    TASK_GROUP_ORPHANED = "task_group.orphaned"  # task_group, open_slots
    TASK_GROUP_GIVEN_UP = "task_group.given_up"  # task_group, reason
    TASK_GROUP_CANCELLED = "task_group.cancelled"  # task_group, reason
    ROLLOUT_RETRY = "rollout.retry"  # task_group, index, error
    ROLLOUT_CRASHED = "rollout.crashed"  # task_group, index
    ROLLOUT_LOST = "rollout.lost"  # task_group, index
    LEASE_LOST = "replica.lease_lost"  # replica
    REPLICA_REPLACED = "replica.replaced"  # replica, incarnation, by
    RUN_RECOVERED = "run.recovered"
    SNAPSHOT_ORPHAN_REMOVED = "snapshot.orphan_removed"  # path
    BATCH_PULLED = "batch.pulled"  # policy, step, rank
    # Tests and benchmarks that watch several processes read these:
    CHECKPOINT_DAMAGED = "checkpoint.damaged"
    CHECKPOINT_LOADED = "checkpoint.loaded"
    STEP_REPLAYED = "step.replayed"
    VERSION_DIFFERS = "version.differs_after_replay"
    RECORD_SET_ASIDE = "journal.set_aside"
    REPLICA_JOINED = "replica.joined"
    ENGINE_UPDATED = "engine.updated"
    WEIGHTS_UPDATED = "weights.updated"
    TRANSPORT_FAILED = "weights.transport_failed"
    WEIGHTS_GAVE_UP_DELTA = "weights.gave_up_delta"  # policy, version: the snapshot is fetched instead
    WEIGHTS_KEPT_OLD = "weights.kept_old"
    RUN_ENDED = "run.ended"
    RUN_UNSTALLED = "run.unstalled"
    RPC_FAILED = "rpc.failed"
    SERVER_READY = "server.ready"
    SERVER_LISTENING = "server.listening"
    WORKER_READY = "worker.ready"
    LOOP_BLOCKED = "watchdog.loop_blocked"
    THREAD_STUCK = "watchdog.thread_stuck"
    TRAJECTORIES_REFUSED = "trajectories.refused"
    ROLLOUT_FAILED = "rollout.failed"


# --- Prepares a process for the streams, signals and proxies that it inherits.


def settle(*, outlives_output: bool = True) -> None:
    """Call first, before files are opened and processes are started.

    ``outlives_output``: output that cannot be written (the reader left, the disk is full) is dropped; else the error is raised.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: a file of ours would get its number, and the output of libraries
            nothing = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nothing, True)
            setattr(sys, name, open(nothing, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number and outlives_output:
            raw = io.BufferedWriter(_Droppable(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, getattr(sys, name).encoding, "replace", line_buffering=True))
        elif number:
            getattr(sys, name).reconfigure(errors="replace")  # a sign that the terminal lacks
    for name in ("PYTHONIOENCODING", "PYTHONOPTIMIZE"):  # of this terminal; and transformers needs docstrings
        os.environ.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would not tell how a child ended
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reach_directly()


def reach_directly(*hosts: str) -> None:
    """Exempt loopback and ``hosts`` from the proxies of the environment, for HTTP clients here and in child processes."""
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        given = [place.strip() for place in os.environ.get(name, os.environ.get(other, "")).split(",") if place.strip()]
        if "*" not in given:  # which some clients take as a word of its own, and not as a part of a list
            os.environ[name] = ",".join(dict.fromkeys([*given, "127.0.0.1", "localhost", "::1", *hosts]))


class _Droppable(io.FileIO):
    def write(self, data: Any) -> int:
        """Write if possible; returns the length in any case."""
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)

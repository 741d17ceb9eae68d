"""The supervisor: enforces every limit, decides every verdict, and empties every slot.

One thread, one epoll loop, started before the gateway has any thread. The process is the child subreaper, so an orphan
of a program becomes its child (at tier 2 the child of the slot's first process) and is found. The supervisor answers
one gateway and ends, with all runs, when that gateway ends.

Invariant: an answer is sent only when the run's slot has no process and an empty work dir.
"""

from __future__ import annotations

import _socket
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import native, procfs, seccomp, wire
from .confinement import landlock_version
from .fork_server import ForkServer, ForkServers
from .run import Limits, Run, sealed
from .slots import Slot
from .statuses import STOOD_STILL_S, RunStatus
from .wire import Start

# --- Channels.


_READ_BYTES = 1 << 16  # at once: a buffer below the size from which each is a mapping of its own


class Outlet:
    """An end of a stream, registered with the supervisor's epoll. What the other end does not take at once waits; what an
    end that has gone does not take is dropped, for a read tells."""

    def __init__(self, epoll: select.epoll, fd: int) -> None:
        self._epoll = epoll
        self.fd = fd
        self.unsent = bytearray()
        self._waits_to_send = False
        os.set_blocking(fd, False)
        epoll.register(fd, select.EPOLLIN)

    def flush(self) -> None:
        try:
            sent = os.write(self.fd, self.unsent)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            sent = len(self.unsent)
        del self.unsent[:sent]
        if bool(self.unsent) is not self._waits_to_send:
            self._waits_to_send = bool(self.unsent)
            self._epoll.modify(self.fd, select.EPOLLIN | (select.EPOLLOUT if self.unsent else 0))


class GatewayEnd(Outlet):
    """The channel of the gateway."""

    def __init__(self, epoll: select.epoll, channel: socket.socket) -> None:
        super().__init__(epoll, channel.fileno())
        self._channel = channel
        self._frames = wire.FrameReader()

    def receive(self) -> Iterator[tuple[dict[str, Any], list[bytes]]] | None:
        """The requests that have come; None when the gateway has closed its end."""
        try:
            data = self._channel.recv(_READ_BYTES)
        except ConnectionResetError:
            return None
        return self._frames.feed(data) if data else None

    def send(self, head: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self.unsent += wire.encode(head, blobs)
        if head["id"]:  # the probe's run has none: no gateway asked
            self.flush()


_FRAME = struct.Struct("!I")


class InteractiveChannel(Outlet):
    """The socket of a live process, whose other end is the harness's."""

    def __init__(self, epoll: select.epoll, run: Run) -> None:
        super().__init__(epoll, run.answer.fd)
        self.run = run
        self.received = bytearray()
        self.is_open = True

    def write(self, data: bytes) -> None:
        """Write to the harness; to one that reads no more without effect: its end gives the reason."""
        if self.is_open:
            self.unsent += data
            self.flush()

    def read(self) -> None:
        """Add the harness's new output to ``received``."""
        answer = self.run.answer
        answer.drain()
        if not answer.truncated:
            self.received += answer.take()
        if not answer.open or answer.truncated:
            self.close()

    def is_whole_frame(self, largest: int) -> bool | None:
        """Whether ``received`` is one frame; None while more data may complete one, False when no data can."""
        if len(self.received) < _FRAME.size:
            return None
        size = _FRAME.size + _FRAME.unpack_from(self.received)[0]
        if size > largest or len(self.received) > size:
            return False
        return True if len(self.received) == size else None

    def close(self) -> None:
        """Listen no more; the run closes the descriptor."""
        if self.is_open and self.run.answer.open:
            self._epoll.unregister(self.fd)  # a closed descriptor has left by itself
        self.is_open = False


# --- The supervisor.


_PR_SET_CHILD_SUBREAPER = 36
_WITHOUT_ANSWER = ("program", "judged", "echo")  # modes whose only outputs are stdout and stderr
_CLEANING_LOOK_S = 0.002
_COUNT_USER_EVERY_S = 1.0
_KILL_TAKES_S = 0.05  # before a run that was stopped is looked at again


class Supervisor:
    """Runs programs for the probe (``run_alone``) and then for the gateway (``serve``)."""

    def __init__(
        self,
        gateway: socket.socket,
        tier: str,
        slots: Sequence[Slot],
        num_programs: int,
        fork_settings: dict[str, Any],
    ) -> None:
        """``slots``: ``num_programs`` for programs, the rest for live processes. The gateway counts free slots, too, and
        never asks for more than there are."""
        self._tier = tier
        self._slots = slots
        self._free = [*slots[:num_programs]]
        self._free_live = [*slots[num_programs:]]
        self._runs: dict[int, Run] = {}
        self._cleaning: dict[int, Run] = {}
        self._channels: dict[int, InteractiveChannel] = {}
        self._epoll = select.epoll()
        self._gateway = GatewayEnd(self._epoll, gateway)
        self.forks = ForkServers(
            self._epoll, {**fork_settings, "tier": tier, "slot_dirs": [slot.directory for slot in self._slots]}
        )
        self._pid = os.getpid()
        self._user_tasks = 0
        self._count_again = 0.0
        self.forks.get(wire.PLAIN)

    def _fork_server_died(self, server: ForkServer) -> None:
        """A fork server died, and its children with the server; the machine is at fault for their runs.

        A child that was about to ask for the parent-death signal cannot see, from its own pid namespace, that its parent
        is dead: the end of the namespace kills it.
        """
        for run_id in self.forks.died(server):
            if run_id in self._runs:
                run = self._runs[run_id]
                if run.stop_status is None:
                    run.stop_status, run.detail = RunStatus.INFRA_ERROR, "the fork server died"
                run.slot.kill_namespace()
                self._begin_cleaning(run, time.monotonic())
        self.forks.get(server.profile)

    # -- loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the gateway closes its end."""
        while self._turn():
            pass
        for slot in self._slots:
            slot.sweep()
            slot.close()

    def run_alone(self, source: bytes, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        """One run without a gateway: the start-up probe."""
        self._start({"id": 0, "mode": "program", "profile": "plain"}, limits, source, b"", b"")
        while not self._gateway.unsent:
            if not self._turn():
                raise SystemExit("the gateway has gone")
        frame = next(wire.FrameReader().feed(bytes(self._gateway.unsent)))
        self._gateway.unsent.clear()
        return frame

    def close(self) -> None:
        self.forks.close()
        for slot in self._slots:
            slot.close()

    def _turn(self) -> bool:
        now = time.monotonic()
        wait = -1.0
        if self._cleaning:
            wait = _CLEANING_LOOK_S
        elif self._runs:
            wait = max(0.0, min(run.next_look for run in self._runs.values()) - now)
        events = self._epoll.poll(wait)
        stood_still_s = time.monotonic() - now - wait if wait >= 0 else 0.0
        if stood_still_s > STOOD_STILL_S:
            for run in self._runs.values():
                run.stood_still(stood_still_s)
        for fd, event in events:
            server = self.forks.of_fd(fd)
            if server is not None:
                self._receive_from(server)
            elif fd == self._gateway.fd:
                if event & select.EPOLLOUT:
                    self._gateway.flush()
                if event & ~select.EPOLLOUT and not self._receive_requests():
                    return False
            else:
                for channel in [one for one in self._channels.values() if one.fd == fd and one.is_open]:
                    if event & select.EPOLLOUT:
                        channel.flush()
                    if event & ~select.EPOLLOUT:
                        self._send_output(channel)
        now = time.monotonic()
        due = [run for run in self._runs.values() if run.next_look <= now]
        if due:
            orphans = self._orphans()
            for run in due:
                self._check_limits(run, now, orphans)
        for run in list(self._cleaning.values()):
            self._clean(run, now)
        return True

    def _check_limits(self, run: Run, now: float, orphans: list[int]) -> None:
        run.strays_cpu_s = max(run.strays_cpu_s, run.slot.adopted_cpu_s() - run.adopted_before_s)
        status = run.check_limits(now, run.slot.strays(orphans))
        if run.id in self._channels:
            self._send_output(self._channels[run.id])
        if status is not None:
            self._stop(run, status)
        elif run.turn is not None and run.pid is not None and run.turn.check(now, run.is_flooded):
            run.fork_server.send(wire.order(wire.INTERRUPT, run.id))

    def _stop(self, run: Run, status: RunStatus) -> None:
        if run.stop_status is None:
            run.stop_status = status
        # sent to the fork server, which alone knows that the kernel has not reused the pid
        run.fork_server.send(wire.order(wire.KILL, run.id))
        run.next_look = time.monotonic() + _KILL_TAKES_S

    # -- the gateway's side -------------------------------------------------------------------------------------

    def _receive_requests(self) -> bool:
        """Handle requests. Returns False when the gateway has gone."""
        requests = self._gateway.receive()
        if requests is None:
            return False
        for head, blobs in requests:
            run_id = head["id"]
            if head["kind"] == "run":
                self._start(head, Limits(**head["limits"]), *blobs)
            elif head["kind"] == "say" and run_id in self._channels:
                self._runs[run_id].ask(time.monotonic())
                self._channels[run_id].write(blobs[0])
            elif head["kind"] == "cancel" and run_id in self._runs:
                self._stop(self._runs[run_id], RunStatus.CANCELLED)
        return True

    def _send_output(self, channel: InteractiveChannel, last: bool = False) -> None:
        run = channel.run
        channel.read()
        held_back = run.turn is not None and run.turn.awaits_signal and not last
        if not channel.received or held_back:
            return
        if not last:
            whole = channel.is_whole_frame(run.limits.answer_bytes)
            if whole is False or run.turn is None:
                run.detail = "the code wrote to the process's own channel"
                self._stop(run, RunStatus.RUNTIME_ERROR)
                return
            if whole is None:  # the turn, and with the turn the time limit, continues
                return
        said = bytes(channel.received)
        channel.received.clear()
        told, output = run.end_turn()
        self._gateway.send({"kind": "said", "id": run.id, **told}, [said, *output])

    # -- runs ---------------------------------------------------------------------------------------------------

    def _start(self, head: dict[str, Any], limits: Limits, source: bytes, stdin: bytes, payload: bytes) -> None:
        slot = (self._free_live if limits.turn_s else self._free).pop()
        source_fd = sealed(source)
        stdin_fd = sealed(stdin) if stdin else _empty_input()
        answers = head["mode"] not in _WITHOUT_ANSWER
        pipes = [os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), _no_pipe()]
        if answers:
            pipes.append(_no_pipe() if limits.turn_s else os.pipe2(os.O_CLOEXEC))
        for read_end, _ in pipes:
            os.set_blocking(read_end, False)
        (out, write_out), (err, write_err), (note, write_note) = pipes[:3]
        answer, write_answer = pipes[3] if answers else (None, source_fd)  # its place is not empty; the child closes it
        run = Run(head["id"], slot, limits, (out, err, note, answer), time.monotonic())
        run.fork_server = self.forks.get(head["profile"])
        run.adopted_before_s = slot.adopted_cpu_s()
        self._runs[run.id] = run
        if run.is_live:
            ask_fd = write_answer  # questions and answers, on one socket
            self._channels[run.id] = InteractiveChannel(self._epoll, run)
        elif answers:
            ask_fd = sealed(payload) if payload else _empty_input()
        else:
            ask_fd = source_fd
        message = wire.START_STRUCT.pack(
            *Start(wire.START, run.id, wire.MODES[head["mode"]], slot.index, slot.uid, limits.cpu_s,
                   limits.memory_bytes, limits.processes + self._num_others_of_user(), limits.file_bytes,
                   limits.open_files, limits.disk_bytes, limits.num_files, slot.mark, len(source))
        )  # fmt: skip
        if slot.own_user:
            for write_end in (write_out, write_err):  # so that a program may open them by name, as /dev/stdout
                os.fchown(write_end, slot.uid, slot.uid)
        fds = [source_fd, stdin_fd, write_out, write_err, write_note, ask_fd, write_answer]
        namespace = [slot.pid_namespace().namespace_fd] if slot.has_own_disk else []
        run.fork_server.runs.add(run.id)
        run.fork_server.send(message, [*fds, *namespace])
        for fd in set(fds):
            os.close(fd)

    def _receive_from(self, server: ForkServer) -> None:
        message = self.forks.receive(server)
        if message is None:
            self._fork_server_died(server)
            return
        kind, run_id, pid, wait_status, cpu_s, peak = message
        run = self._runs.get(run_id)
        if run is None:
            return
        now = time.monotonic()
        if kind == wire.STARTED:
            run.begin(pid, now)
            return
        if kind == wire.INTERRUPTED:
            if run.turn is not None:
                run.turn.awaits_signal = False
            if run.id in self._channels:
                self._send_output(self._channels[run.id])
            return
        run.wait_status = wait_status
        if run.slot.lost_its_namespace() and run.stop_status is None:
            run.stop_status, run.detail = RunStatus.INFRA_ERROR, "the slot's first process died"
        run.cpu_s = max(run.cpu_s, cpu_s + run.strays_cpu_s)
        run.peak_memory_bytes = max(run.peak_memory_bytes, peak)
        run.left_its_process()
        self._begin_cleaning(run, now)
        self._clean(run, now)

    def _begin_cleaning(self, run: Run, now: float) -> None:
        del self._runs[run.id]
        self._cleaning[run.id] = run
        run.ended = now
        channel = self._channels.pop(run.id, None)
        if channel is not None:
            self._send_output(channel, last=True)
            channel.close()
        if run.stop_status is None:
            run.stop_status = run.check_disk(now, [], last=True)

    def _clean(self, run: Run, now: float) -> None:
        """Answer if the slot is empty; else kill the remaining processes and check again soon."""
        self._reap()
        strays = run.slot.strays(self._orphans())
        if strays:
            used = procfs.usage(procfs.descendants(strays))
            run.cpu_s = max(run.cpu_s, used.cpu_s + run.strays_cpu_s)
            run.slot.kill(strays)
            return
        try:
            run.slot.wipe()
        except OSError:  # the disk is full for a moment, or a process still writes: checked again
            return
        del self._cleaning[run.id]
        run.close()
        (self._free_live if run.is_live else self._free).append(run.slot)
        self._gateway.send(*run.result(self._tier))

    def _orphans(self) -> list[int]:
        """Orphans of programs, which this process, the child subreaper, has adopted. At tier 2 there are none: the first
        process of each pid namespace adopts them."""
        if self._tier == "2":
            return []
        return [pid for pid in procfs.children(self._pid) if pid not in self.forks.pids]

    def _reap(self) -> None:
        """Reap the dead, and charge them to the run of their user."""
        while True:
            try:
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if state is None:
                return
            _, _, usage = os.wait4(state.si_pid, 0)
            for run in (*self._runs.values(), *self._cleaning.values()):
                if run.slot.own_user and run.slot.uid == state.si_uid:
                    run.strays_cpu_s += usage.ru_utime + usage.ru_stime

    def _num_others_of_user(self) -> int:
        """Processes that the kernel counts with a program's own: at tier 0 those of the gateway's user.

        Without a limit in the kernel a fork bomb doubles in less time than passes between two looks.
        """
        if self._tier != "0":
            return 0
        now = time.monotonic()
        if now >= self._count_again:
            self._user_tasks = procfs.num_tasks_of(os.getuid())
            self._count_again = now + _COUNT_USER_EVERY_S
        return self._user_tasks


def _empty_input() -> int:
    """An empty input. Opened anew for each run: flags and owner of one opening would be a message to the next program."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _no_pipe() -> tuple[int, int]:
    """A socket pair for the note: where programs run as our own user they could open a pipe by name, and read written
    notes. Without the wrapper of ``socket``, which asks about each end."""
    ours, theirs = _socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ours.detach(), theirs.detach()


# --- The entry: finds the strongest tier that works here, reports the tier, serves.
#
# ``argv[1]`` is a JSON object: channel, tiers (strongest first), base_dir, uids (of programs, then of live processes; tiers 2
# and 1), marks (as many), num_slots, num_live, packages, profiles, links (of a shell). The
# first frame to the gateway is ``hello`` with the tier, or ``refused`` with the failure of each tier.


_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts")
# A real program under the real confinement: imports from disk work, the network is refused, others' files too.
_PROBE = b"""
import ctypes, json, os, tempfile, uuid
refused = []
for attempt in ("socket.socket()", "open('/proc/1/environ')", "os.kill(1, 0)", "open('/dev/shm/x', 'w')"):
    try:
        import socket
        eval(attempt)
    except OSError:
        refused.append(attempt.partition('(')[0])
with open("file", "w") as file:
    file.write("x")
namespaces = {}
for name in ("mnt", "pid", "net", "ipc", "uts"):
    try:
        namespaces[name] = os.readlink("/proc/self/ns/" + name)
    except OSError:
        pass
disk = os.statvfs(".")
print(json.dumps({"uid": os.getuid(), "refused": refused, "namespaces": namespaces,
                  "disk": disk.f_blocks * disk.f_frsize}))
"""
_PROBE_DISK_BYTES = 1 << 20
_PROBE_LIMITS = Limits(10.0, 10.0, 512 << 20, 16, 65536, 0, 1 << 20, 64, _PROBE_DISK_BYTES, 64)


def _try_tier(gateway: socket.socket, tier: str, settings: dict[str, Any]) -> tuple[Supervisor, list[str]] | str:
    """A supervisor that has run the probe, and the operations that were refused in the probe; or why this tier does not
    work."""
    own_users = tier in ("2", "1")
    num_all = settings["num_slots"] + settings["num_live"]
    uids = settings["uids"] if own_users else [os.getuid()] * num_all
    if own_users and not uids:
        return f"tier {tier} needs root"
    if tier == "U" and os.getuid() == 0:
        return "tier U is for users other than root; root has tier 1"
    base_dir = settings["base_dir"]
    try:
        slots = [Slot(index, uid, settings["marks"][index], tier, base_dir) for index, uid in enumerate(uids)]
        for slot in slots:
            slot.sweep()
            slot.wipe(at_once=True)
    except OSError as error:  # such as root of a user namespace that has one user
        return f"tier {tier}: no directory can be made for user {uids[0]}: {error}"
    for name in ("root", "packages"):
        os.makedirs(os.path.join(base_dir, name), mode=0o755, exist_ok=True)
    link_dir = os.path.join(base_dir, "packages")
    fork_settings = {"packages": settings["packages"], "link_dir": link_dir, "links": settings["links"]}
    try:
        supervisor = Supervisor(gateway, tier, slots, settings["num_slots"], fork_settings)
        head, blobs = supervisor.run_alone(_PROBE, _PROBE_LIMITS)
    except OSError as error:
        return f"tier {tier}: {error}"
    wrong = head["detail"]
    if head["status"] == RunStatus.OK:
        seen = json.loads(blobs[0])
        wrong = _not_confined(tier, seen, uids)
        if not wrong:
            return supervisor, seen["refused"]
    supervisor.close()
    said = blobs[1].decode(errors="replace").strip().splitlines()
    return f"tier {tier}: {head['status']} {wrong} {said[-1] if said else ''}".strip()


def _not_confined(tier: str, seen: dict[str, Any], uids: list[int]) -> str:
    """A fault of the tier that the probe has found; empty when the tier keeps its guarantees."""
    if tier == "0":
        return ""
    if "socket.socket" not in seen["refused"]:
        return "the probe could open a socket"
    if tier in ("2", "1") and seen["uid"] not in uids:
        return f"the probe ran as user {seen['uid']}"
    if tier == "2":
        shared = [
            name for name in _NAMESPACES if seen["namespaces"].get(name) in (None, os.readlink(f"/proc/self/ns/{name}"))
        ]
        if shared:
            return f"the probe shared our namespaces {shared}"
        if seen["disk"] > 2 * _PROBE_DISK_BYTES:
            return f"the probe's work dir was not sized: {seen['disk']} bytes"
    return ""


def main() -> None:
    settings = json.loads(sys.argv[1])
    gateway = socket.socket(fileno=settings["channel"])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):  # adopt orphans
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the gateway
    reasons: list[str] = []
    for tier in settings["tiers"]:
        outcome = _try_tier(gateway, tier, settings)
        if not isinstance(outcome, str):
            supervisor, refused = outcome
            for profile in settings["profiles"]:  # now rather than at the first run that asks for them
                supervisor.forks.get(profile)
            facts = {
                "refused": refused,
                "seccomp": seccomp.is_supported(),
                "landlock_abi": landlock_version(),
                "cpp": os.access(native.COMPILER, os.X_OK),
            }
            gateway.sendall(wire.encode({"kind": "hello", "tier": tier, "facts": facts, "reasons": reasons}))
            supervisor.serve()
            return
        reasons.append(outcome)
    gateway.sendall(wire.encode({"kind": "refused", "reasons": reasons}))
